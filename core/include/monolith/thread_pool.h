// Threads for the inside of one call, shared by all tables of the process. The pool's own are started on first use, never on load.
// A program that has threads already can lend them with set_executor.
#pragma once

#include <cstddef>
#include <functional>

namespace monolith {

// How many threads one call may use, the caller's included; >= 1. Starts at the number of cores. Thread-safe.
void set_num_threads(std::size_t n);  // throws InvalidArgument for 0
std::size_t num_threads() noexcept;

// Calls body(context) on `threads` threads at once, the caller's included, and returns true after the last call has returned. Returns
// false, and has called nothing, where it has no threads to lend: in this thread, in a forked child, or not that many. `body` never
// throws.
using Executor = bool (*)(std::size_t threads, void (*body)(void*), void* context);

// Every parallel_for asks `executor` first, and uses the pool's own threads if it declines. Null, as at the start, is none.
// Thread-safe; calls that run go on with the executor they have.
void set_executor(Executor executor) noexcept;

// Calls f(0) ... f(tasks - 1), each once, on the caller and other threads, and returns when all have returned. The caller does
// everything when there is one task, when the pool is busy with another call, or inside another parallel_for: the cores are in use
// already. The first exception is rethrown after the last task ended.
void parallel_for(std::size_t tasks, const std::function<void(std::size_t)>& f);

}  // namespace monolith
