// Worker threads shared by all tables of the process, for the inside of one call. Started on first use, never on load. Calls of the
// main thread use those that torch has, if there are as many.
#pragma once

#include <cstddef>
#include <functional>

namespace monolith {

// How many threads one call may use, the caller's included; >= 1. Starts at the number of cores. Thread-safe.
void set_num_threads(std::size_t n);  // throws InvalidArgument for 0
std::size_t num_threads() noexcept;

// Calls f(0) ... f(tasks - 1), each once, on the caller and the pool's threads, and returns when all have returned. When the
// pool is busy with another call, or there is one task, the caller does everything: many threads calling at once share the
// cores already. The first exception is rethrown after the last task ended.
void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& f);

}  // namespace monolith
