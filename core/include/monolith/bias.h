// A bias before each vector, as rows of a table have it: taken apart, and put together again.
//
// Thread-safety: pure functions on up to num_threads() threads; the caller keeps the arrays unchanged while a call runs.
// Ownership: the caller owns every array; outputs may be uninitialised and must not overlap inputs.
// Failure: InvalidArgument before any output is written.
#pragma once

#include <span>

namespace monolith {

// rows [n, 1 + dim] -> bias [n], vectors [n, dim]; n is the size of bias.
void split_bias(std::span<const float> rows, std::span<float> bias, std::span<float> vectors);
// The other way.
void join_bias(std::span<const float> bias, std::span<const float> vectors, std::span<float> rows);

}  // namespace monolith
