// Products of matrices for small requests: see monolith/dense_executor.h. Included only by kernels.cc.
//
// A result has the same bits on every instruction set and for every number of rows: each is a sum over k in one order.
#pragma once

#include "kernels/kernels.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

// The last k % 8 numbers, and zeros behind them.
[[gnu::always_inline]] inline void copy_rest(float (&to)[8], const float* from, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) to[i] = from[i];
}

// kRows rows with kColumns columns that have their k numbers next to each other: eight running sums for each result, and as many
// results at once as hide the latency of an addition.
template <std::size_t kRows, std::size_t kColumns>
[[gnu::always_inline]] inline void dot_block(const MatrixProduct& p, const float* a, const float* b, const float* bias, float* out) {
  Vector sums[kRows][kColumns] = {};
  const std::size_t whole = p.k / 8 * 8, rest = p.k - whole;
  for (std::size_t d = 0; d < whole; d += 8) {
    for (std::size_t c = 0; c < kColumns; ++c) {
      const Vector& column = vector_at(b + c * p.b_column + d);
      for (std::size_t r = 0; r < kRows; ++r) sums[r][c] += vector_at(a + r * p.a_row + d) * column;
    }
  }
  if (rest != 0) {
    for (std::size_t c = 0; c < kColumns; ++c) {
      float column[8] = {};
      copy_rest(column, b + c * p.b_column + whole, rest);
      for (std::size_t r = 0; r < kRows; ++r) {
        float row[8] = {};
        copy_rest(row, a + r * p.a_row + whole, rest);
        sums[r][c] += vector_at(row) * vector_at(column);
      }
    }
  }
  // Through memory: the compiler takes single numbers out of a register more slowly.
  float parts[kRows][kColumns][8];
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t c = 0; c < kColumns; ++c) *reinterpret_cast<Vector*>(parts[r][c]) = sums[r][c];
  }
  for (std::size_t r = 0; r < kRows; ++r) {
    for (std::size_t c = 0; c < kColumns; ++c) {
      const float* const s = parts[r][c];
      const float sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
      out[r * p.out_row + c * p.out_column] = bias == nullptr ? sum : sum + bias[r * p.bias_row + c * p.bias_column];
    }
  }
}

template <std::size_t kRows, std::size_t kColumns>
[[gnu::always_inline]] inline void dot_rows_block(const MatrixProduct& p, std::size_t i) {
  const auto at = [&](std::size_t j) __attribute__((always_inline)) {
    return p.bias == nullptr ? nullptr : p.bias + i * p.bias_row + j * p.bias_column;
  };
  const float* const a = p.a + i * p.a_row;
  float* const out = p.out + i * p.out_row;
  std::size_t j = 0;
  for (; j + kColumns <= p.n; j += kColumns) {
    dot_block<kRows, kColumns>(p, a, p.b + j * p.b_column, at(j), out + j * p.out_column);
  }
  for (; j < p.n; ++j) dot_block<kRows, 1>(p, a, p.b + j * p.b_column, at(j), out + j * p.out_column);
}

void dot_product(const MatrixProduct& shared) {
  const MatrixProduct p = shared;
  std::size_t i = 0;
  for (; i + 4 <= p.m; i += 4) dot_rows_block<4, 2>(p, i);
  for (; i < p.m; ++i) dot_rows_block<1, 8>(p, i);
}

// kVectors times eight columns, whose numbers for one k are next to each other.
template <std::size_t kVectors>
[[gnu::always_inline]] inline void sum_columns(const MatrixProduct& p, std::size_t i, std::size_t j) {
  Vector sums[kVectors] = {};
  for (std::size_t d = 0; d < p.k; ++d) {
    const float x = p.a[i * p.a_row + d * p.a_k];
    for (std::size_t v = 0; v < kVectors; ++v) sums[v] += x * vector_at(p.b + d * p.b_k + j + v * 8);
  }
  float* const out = p.out + i * p.out_row + j;
  for (std::size_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(out + v * 8) = sums[v];
}

void column_product(const MatrixProduct& shared) {
  const MatrixProduct p = shared;
  for (std::size_t i = 0; i < p.m; ++i) {
    std::size_t j = 0;
    for (; j + 64 <= p.n; j += 64) sum_columns<8>(p, i, j);
    for (; j + 8 <= p.n; j += 8) sum_columns<1>(p, i, j);
    for (; j < p.n; ++j) {
      float sum = 0;
      for (std::size_t d = 0; d < p.k; ++d) sum += p.a[i * p.a_row + d * p.a_k] * p.b[d * p.b_k + j];
      p.out[i * p.out_row + j] = sum;
    }
    if (p.bias == nullptr) continue;
    for (j = 0; j < p.n; ++j) p.out[i * p.out_row + j] += p.bias[i * p.bias_row + j * p.bias_column];
  }
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
