#include "monolith/bias.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "monolith/error.h"
#include "monolith/thread_pool.h"

namespace monolith {
namespace {

// Rows that are worth waking a thread for.
constexpr std::size_t kRowsPerTask = 8192;

// A vector is a few moves: calling a function to copy it would take longer.
inline void copy(float* to, const float* from, std::size_t n) noexcept {
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4) __builtin_memcpy(to + i, from + i, 4 * sizeof(float));
  for (; i < n; ++i) to[i] = from[i];
}

template <typename Work>
void by_parts(std::size_t rows, const Work& work) {
  const std::size_t tasks = std::clamp<std::size_t>(rows / kRowsPerTask, 1, num_threads());
  parallel_for(tasks, [&](std::size_t task) { work(rows * task / tasks, rows * (task + 1) / tasks); });
}

}  // namespace

void split_bias(std::span<const float> rows, std::span<float> bias, std::span<float> vectors) {
  const std::size_t n = bias.size();
  if (rows.size() != n + vectors.size() || (n != 0 && vectors.size() % n != 0)) {
    throw InvalidArgument("split_bias: " + std::to_string(rows.size()) + " numbers are not " + std::to_string(n) + " rows of a bias and " +
                          std::to_string(vectors.size()) + " numbers");
  }
  const std::size_t dim = n == 0 ? 0 : vectors.size() / n;
  by_parts(n, [&](std::size_t first, std::size_t last) {
    const float* from = rows.data() + first * (dim + 1);
    float* to = vectors.data() + first * dim;
    for (std::size_t row = first; row < last; ++row, from += dim + 1, to += dim) {
      bias[row] = *from;
      copy(to, from + 1, dim);
    }
  });
}

void join_bias(std::span<const float> bias, std::span<const float> vectors, std::span<float> rows) {
  const std::size_t n = bias.size();
  if (rows.size() != n + vectors.size() || (n != 0 && vectors.size() % n != 0)) {
    throw InvalidArgument("join_bias: " + std::to_string(n) + " rows of a bias and " + std::to_string(vectors.size()) +
                          " numbers do not make " + std::to_string(rows.size()));
  }
  const std::size_t dim = n == 0 ? 0 : vectors.size() / n;
  by_parts(n, [&](std::size_t first, std::size_t last) {
    const float* from = vectors.data() + first * dim;
    float* to = rows.data() + first * (dim + 1);
    for (std::size_t row = first; row < last; ++row, from += dim, to += dim + 1) {
      *to = bias[row];
      copy(to + 1, from, dim);
    }
  });
}

}  // namespace monolith
