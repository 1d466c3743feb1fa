#include "monolith/pairs.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "monolith/error.h"
#include "monolith/thread_pool.h"

namespace monolith {
namespace {

// Numbers of x that are worth waking a thread for: some tens of microseconds of work.
constexpr std::size_t kFloatsPerTask = 32768;

void check_size(const char* field, std::size_t size, std::size_t expected) {
  if (size == expected) return;
  throw InvalidArgument(std::string(field) + " has " + std::to_string(size) + " numbers, expected " + std::to_string(expected));
}

// Calls work(first, count) for parts of the batch.
template <typename Work>
void by_parts(PairShape shape, const Work& work) {
  const std::size_t floats = shape.batch * shape.n * shape.k;
  const std::size_t tasks = std::clamp<std::size_t>(std::min(floats / kFloatsPerTask, shape.batch), 1, num_threads());
  parallel_for(tasks, [&](std::size_t task) {
    const std::size_t first = shape.batch * task / tasks;
    work(first, shape.batch * (task + 1) / tasks - first);
  });
}

std::size_t pairs_of(std::size_t n) { return n < 2 ? 0 : n * (n - 1) / 2; }

// The sizes of an example of dot_pairs.
struct DotSizes {
  std::size_t n, k, in, out;
  DotSizes(PairShape shape, std::span<const float> dense, std::span<const float> x)
      : n(shape.n + !dense.empty()),
        k(shape.k),
        in(shape.n * shape.k),
        out((dense.empty() ? 0 : k) + pairs_of(n)) {
    check_size("x", x.size(), shape.batch * in);
    if (!dense.empty()) check_size("dense", dense.size(), shape.batch * k);
  }

  PairBatch batch(std::span<const float> dense, std::span<const float> x, std::size_t first, std::size_t count) const {
    return {count, n, k, dense.empty() ? nullptr : dense.data() + first * k, x.data() + first * in};
  }
};

PairBatch sum_batch(PairShape shape, std::span<const float> x, std::size_t first, std::size_t count) {
  return {count, shape.n, shape.k, nullptr, x.data() + first * shape.n * shape.k};
}

}  // namespace

void dot_pairs(PairShape shape, std::span<const float> dense, std::span<const float> x, std::span<float> out) {
  const DotSizes sizes(shape, dense, x);
  check_size("out", out.size(), shape.batch * sizes.out);
  if (out.empty()) return;
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    std::vector<float> scratch((sizes.n + 7) / 8 * 8 * sizes.k + sizes.n * sizes.k + pairs_of(sizes.n) + 8);
    kernels().dot_pairs(sizes.batch(dense, x, first, count), out.data() + first * sizes.out, scratch.data());
  });
}

void dot_pairs_gradient(PairShape shape, std::span<const float> dense, std::span<const float> x, std::span<const float> grad_out,
                        std::span<float> grad_dense, std::span<float> grad_x) {
  const DotSizes sizes(shape, dense, x);
  check_size("grad_out", grad_out.size(), shape.batch * sizes.out);
  check_size("grad_dense", grad_dense.size(), dense.size());
  check_size("grad_x", grad_x.size(), x.size());
  if (grad_x.empty() && grad_dense.empty()) return;
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    std::vector<float> scratch(dense.empty() ? 0 : 2 * sizes.n * sizes.k);
    kernels().dot_pairs_gradient(sizes.batch(dense, x, first, count), grad_out.data() + first * sizes.out,
                                 dense.empty() ? nullptr : grad_dense.data() + first * sizes.k, grad_x.data() + first * sizes.in,
                                 scratch.data());
  });
}

void sum_pairs(PairShape shape, std::span<const float> x, std::span<float> out) {
  check_size("x", x.size(), shape.batch * shape.n * shape.k);
  check_size("out", out.size(), shape.batch);
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    kernels().sum_pairs(sum_batch(shape, x, first, count), out.data() + first);
  });
}

void sum_pairs_gradient(PairShape shape, std::span<const float> x, std::span<const float> grad_out, std::span<float> grad_x) {
  const std::size_t floats = shape.n * shape.k;
  check_size("x", x.size(), shape.batch * floats);
  check_size("grad_out", grad_out.size(), shape.batch);
  check_size("grad_x", grad_x.size(), shape.batch * floats);
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    kernels().sum_pairs_gradient(sum_batch(shape, x, first, count), grad_out.data() + first, grad_x.data() + first * floats);
  });
}

}  // namespace monolith
