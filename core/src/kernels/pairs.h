// Products of pairs of vectors, one example at a time: see monolith/pairs.h. Included only by kernels.cc.
#pragma once

#include "kernels/kernels.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

// By reference: returned by value, its registers would depend on the instruction set.
[[gnu::always_inline]] inline const Vector& vector_at(const float* p) { return *reinterpret_cast<const Vector*>(p); }

// None may have no address.
[[gnu::always_inline]] inline void copy_floats(float* to, const float* from, std::size_t n) {
  if (n != 0) __builtin_memcpy(to, from, n * sizeof(float));
}

// Where the products of row i with the rows before it begin.
[[gnu::always_inline]] inline std::size_t first_pair(std::size_t i) { return i == 0 ? 0 : i * (i - 1) / 2; }

// out[j] = row * column j for each of kRows rows and kVectors times eight columns, which lie behind each other. Two rows at once are
// faster than one: fewer loads, and no sum has to wait for its last addition.
template <std::size_t kRows, std::size_t kVectors>
[[gnu::always_inline]] inline void dot_columns(const float* rows, const float* columns, std::size_t stride, std::size_t k,
                                               float* const (&out)[kRows]) {
  Vector sums[kRows][kVectors] = {};
  for (std::size_t d = 0; d < k; ++d) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      const Vector& column = vector_at(columns + d * stride + v * 8);
      for (std::size_t r = 0; r < kRows; ++r) sums[r][v] += rows[r * k + d] * column;
    }
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(out[r] + v * 8) = sums[r][v];
  }
}

// Rows i .. i + kRows - 1 with all rows before the last of them, from the end to the beginning.
template <std::size_t kRows>
void dot_rows(const float* x, const float* columns, std::size_t stride, std::size_t k, std::size_t i, float* products) {
  std::size_t j = (i + kRows - 1 + 7) / 8 * 8;
  const auto out = [&](std::size_t r) { return products + first_pair(i + r) + j; };
  const auto dot = [&]<std::size_t kVectors>() __attribute__((always_inline)) {
    j -= kVectors * 8;
    if constexpr (kRows == 1) dot_columns<1, kVectors>(x + i * k, columns + j, stride, k, {out(0)});
    if constexpr (kRows == 2) dot_columns<2, kVectors>(x + i * k, columns + j, stride, k, {out(0), out(1)});
  };
  if (j % 16 != 0) dot.template operator()<1>();
  while (j != 0) dot.template operator()<2>();
}

// The vectors of an example, one behind the other; gathered if there is a dense one before those of x.
[[gnu::always_inline]] inline const float* vectors_of(const PairBatch& batch, std::size_t b, float* gathered) {
  const std::size_t k = batch.k, others = batch.n - (batch.dense != nullptr);
  const float* const x = batch.x + b * others * k;
  if (batch.dense == nullptr) return x;
  copy_floats(gathered, batch.dense + b * k, k);
  copy_floats(gathered + k, x, others * k);
  return gathered;
}

// Whole vectors are written: what is too much of a row is overwritten by the next one, and scratch has room for what is too much of the
// last.
void dot_pairs(const PairBatch& batch, float* out, float* scratch) {
  const std::size_t n = batch.n, k = batch.k, pairs = first_pair(n);
  const std::size_t stride = (n + 7) / 8 * 8;
  float* const columns = scratch;
  float* const gathered = columns + stride * k;
  float* const products = gathered + n * k;
  __builtin_memset(columns, 0, stride * k * sizeof(float));
  for (std::size_t b = 0; b < batch.size; ++b, out += pairs) {
    const float* const x = vectors_of(batch, b, gathered);
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t d = 0; d < k; ++d) columns[d * stride + i] = x[i * k + d];
    }
    std::size_t i = 1;
    for (; i + 2 <= n; i += 2) dot_rows<2>(x, columns, stride, k, i, products);
    if (i < n) dot_rows<1>(x, columns, stride, k, i, products);
    if (batch.dense != nullptr) {
      copy_floats(out, x, k);
      out += k;
    }
    copy_floats(out, products, pairs);
  }
}

// The gradients of rows i .. i + kRows - 1, kVectors times eight floats of each: the sums over all other rows j of grad(i, j) * x_j,
// in the order of j.
template <std::size_t kRows, std::size_t kVectors>
[[gnu::always_inline]] inline void dot_gradient(const float* x, const float* grads, std::size_t n, std::size_t k, std::size_t i,
                                                float* out) {
  Vector sums[kRows][kVectors] = {};
  const auto add = [&](std::size_t r, float factor, std::size_t j) __attribute__((always_inline)) {
    for (std::size_t v = 0; v < kVectors; ++v) sums[r][v] += factor * vector_at(x + j * k + v * 8);
  };
  for (std::size_t j = 0; j < i; ++j) {
    for (std::size_t r = 0; r < kRows; ++r) add(r, grads[first_pair(i + r) + j], j);
  }
  if constexpr (kRows == 2) {
    const float between = grads[first_pair(i + 1) + i];
    add(0, between, i + 1);
    add(1, between, i);
  }
  const float* after = grads + first_pair(i + kRows) + i;
  for (std::size_t j = i + kRows; j < n; after += j, ++j) {
    for (std::size_t r = 0; r < kRows; ++r) add(r, after[r], j);
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(out + r * k + v * 8) = sums[r][v];
  }
}

template <std::size_t kRows>
void dot_gradients(const float* x, const float* grads, std::size_t n, std::size_t k, std::size_t i, float* out) {
  std::size_t d = 0;
  for (; d + 16 <= k; d += 16) dot_gradient<kRows, 2>(x + d, grads, n, k, i, out + d);
  if (d + 8 <= k) {
    dot_gradient<kRows, 1>(x + d, grads, n, k, i, out + d);
    d += 8;
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t e = d; e < k; ++e) {
      float sum = 0;
      for (std::size_t j = 0; j < i + r; ++j) sum += grads[first_pair(i + r) + j] * x[j * k + e];
      for (std::size_t j = i + r + 1; j < n; ++j) sum += grads[first_pair(j) + i + r] * x[j * k + e];
      out[r * k + e] = sum;
    }
  }
}

void dot_pairs_gradient(const PairBatch& batch, const float* grads, float* grad_dense, float* grad_x, float* scratch) {
  const std::size_t n = batch.n, k = batch.k;
  const bool has_dense = batch.dense != nullptr;
  for (std::size_t b = 0; b < batch.size; ++b, grads += first_pair(n), grad_x += (n - has_dense) * k) {
    const float* const x = vectors_of(batch, b, scratch);
    const float* const as_it_is = grads;
    if (has_dense) grads += k;
    float* const out = has_dense ? scratch + n * k : grad_x;
    std::size_t i = 0;
    for (; i + 2 <= n; i += 2) dot_gradients<2>(x, grads, n, k, i, out + i * k);
    if (i < n) dot_gradients<1>(x, grads, n, k, i, out + i * k);
    if (!has_dense) continue;
    add(grad_dense + b * k, as_it_is, out, k);
    copy_floats(grad_x, out + k, (n - 1) * k);
  }
}

void sum_pairs(const PairBatch& batch, float* out) {
  const std::size_t n = batch.n, k = batch.k;
  const float* x = batch.x;
  for (std::size_t b = 0; b < batch.size; ++b, x += n * k) {
    Vector differences = {};
    std::size_t d = 0;
    for (; d + 8 <= k; d += 8) {
      Vector sum = {}, squares = {};
      for (std::size_t i = 0; i < n; ++i) {
        const Vector v = vector_at(x + i * k + d);
        sum += v;
        squares += v * v;
      }
      differences += sum * sum - squares;
    }
    float total = 0;
    for (std::size_t lane = 0; lane < 8; ++lane) total += differences[lane];
    for (; d < k; ++d) {
      float sum = 0, squares = 0;
      for (std::size_t i = 0; i < n; ++i) {
        sum += x[i * k + d];
        squares += x[i * k + d] * x[i * k + d];
      }
      total += sum * sum - squares;
    }
    out[b] = 0.5f * total;
  }
}

void sum_pairs_gradient(const PairBatch& batch, const float* grads, float* out) {
  const std::size_t n = batch.n, k = batch.k;
  const float* x = batch.x;
  for (std::size_t b = 0; b < batch.size; ++b, x += n * k, out += n * k) {
    const float grad = grads[b];
    std::size_t d = 0;
    for (; d + 8 <= k; d += 8) {
      Vector sum = {};
      for (std::size_t i = 0; i < n; ++i) sum += vector_at(x + i * k + d);
      for (std::size_t i = 0; i < n; ++i) {
        *reinterpret_cast<Vector*>(out + i * k + d) = grad * (sum - vector_at(x + i * k + d));
      }
    }
    for (; d < k; ++d) {
      float sum = 0;
      for (std::size_t i = 0; i < n; ++i) sum += x[i * k + d];
      for (std::size_t i = 0; i < n; ++i) out[i * k + d] = grad * (sum - x[i * k + d]);
    }
  }
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
