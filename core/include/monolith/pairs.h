// Products of all pairs of vectors of an example, and their gradients: what factorization machines and DLRM compute between embeddings.
// An example is n vectors of k floats; x is [batch, n, k]. Pair (i, j) with j < i has place i * (i - 1) / 2 + j.
//
// Thread-safety: pure functions on up to num_threads() threads; the caller keeps the arrays unchanged while a call runs.
// Ownership: the caller owns every array; outputs may be uninitialised and must not overlap inputs.
// Failure: InvalidArgument before any output is written; std::bad_alloc for scratch memory, at most some 16 * n * (n + k) bytes a thread,
// after which outputs are unspecified. Sums are made in one order on every machine and with any number of threads.
#pragma once

#include <cstddef>
#include <span>

namespace monolith {

struct PairShape {
  std::size_t batch, n, k;
};

// out [batch, n (n - 1) / 2]: x_i · x_j. If there is `dense`, [batch, k], it is one vector more, before the others, and comes itself before
// the products, as in DLRM: out is [batch, k + n (n + 1) / 2].
void dot_pairs(PairShape shape, std::span<const float> dense, std::span<const float> x, std::span<float> out);
// grad_out, of the size of out, -> grad_x [batch, n, k] and grad_dense, of the size of dense.
void dot_pairs_gradient(PairShape shape, std::span<const float> dense, std::span<const float> x, std::span<const float> grad_out,
                        std::span<float> grad_dense, std::span<float> grad_x);

// out [batch]: the sum of x_i · x_j over all pairs, as half the difference of the square of the sum and the sum of the squares.
void sum_pairs(PairShape shape, std::span<const float> x, std::span<float> out);
// grad_out [batch] -> grad_x [batch, n, k].
void sum_pairs_gradient(PairShape shape, std::span<const float> x, std::span<const float> grad_out, std::span<float> grad_x);

}  // namespace monolith
