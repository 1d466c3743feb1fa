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

}  // namespace

void dot_pairs(PairShape shape, std::span<const float> x, std::span<float> out) {
  check_size("x", x.size(), shape.batch * shape.n * shape.k);
  check_size("out", out.size(), shape.batch * shape.pairs());
  if (shape.pairs() == 0) return;
  const std::size_t stride = (shape.n + 7) / 8 * 8;
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    std::vector<float> scratch(stride * shape.k + shape.pairs() + 8);
    kernels().dot_pairs(count, shape.n, shape.k, x.data() + first * shape.n * shape.k, out.data() + first * shape.pairs(),
                        scratch.data());
  });
}

void dot_pairs_gradient(PairShape shape, std::span<const float> x, std::span<const float> grad_out, std::span<float> grad_x) {
  const std::size_t floats = shape.n * shape.k;
  check_size("x", x.size(), shape.batch * floats);
  check_size("grad_out", grad_out.size(), shape.batch * shape.pairs());
  check_size("grad_x", grad_x.size(), shape.batch * floats);
  if (grad_x.empty()) return;
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    kernels().dot_pairs_gradient(count, shape.n, shape.k, x.data() + first * floats, grad_out.data() + first * shape.pairs(),
                                 grad_x.data() + first * floats);
  });
}

void sum_pairs(PairShape shape, std::span<const float> x, std::span<float> out) {
  const std::size_t floats = shape.n * shape.k;
  check_size("x", x.size(), shape.batch * floats);
  check_size("out", out.size(), shape.batch);
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    kernels().sum_pairs(count, shape.n, shape.k, x.data() + first * floats, out.data() + first);
  });
}

void sum_pairs_gradient(PairShape shape, std::span<const float> x, std::span<const float> grad_out, std::span<float> grad_x) {
  const std::size_t floats = shape.n * shape.k;
  check_size("x", x.size(), shape.batch * floats);
  check_size("grad_out", grad_out.size(), shape.batch);
  check_size("grad_x", grad_x.size(), shape.batch * floats);
  by_parts(shape, [&](std::size_t first, std::size_t count) {
    kernels().sum_pairs_gradient(count, shape.n, shape.k, x.data() + first * floats, grad_out.data() + first,
                                 grad_x.data() + first * floats);
  });
}

}  // namespace monolith
