// A program of steps comes from a file that may be forged: no step may reach outside of its buffers, and what is computed must be what
// plain loops over the strides give, on every instruction set.
#include "monolith/dense_executor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "monolith/error.h"

namespace {

using namespace monolith;
using Step = DenseExecutor::Step;

std::vector<float> numbers(std::size_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::vector<float> found(n);
  for (float& x : found) x = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 500.0f;
  return found;
}

void run(const DenseExecutor& executor, std::vector<void*> buffers) { executor.run(buffers); }

// Sizes of buffers exactly as large as the steps need, so that the sanitizers see everything beyond them.
std::vector<float> product(std::size_t m, std::size_t n, std::size_t k, bool by_column, bool with_bias) {
  std::vector<float> a = numbers(m * k, 1), b = numbers(k * n, 2), bias = numbers(n, 3), out(m * n, 9);
  const std::size_t b_n = by_column ? 1 : k, b_k = by_column ? n : 1;
  Step step{DenseOp::kProduct, {m, n, k}, {{3, 0, {n, 1, 0}}, {0, 0, {k, 0, 1}}, {1, 0, {0, b_n, b_k}}}};
  if (with_bias) step.operands.push_back({2, 0, {0, 1, 0}});
  const DenseExecutor executor({{a.size()}, {b.size()}, {bias.size()}, {out.size()}}, 3, 1, {step});
  run(executor, {a.data(), b.data(), bias.data(), out.data()});
  for (std::size_t i = 0; i < m; ++i) {
    for (std::size_t j = 0; j < n; ++j) {
      double expected = with_bias ? bias[j] : 0;
      for (std::size_t d = 0; d < k; ++d) expected += double(a[i * k + d]) * b[j * b_n + d * b_k];
      CHECK_NEAR(out[i * n + j], expected, 1e-5 * static_cast<double>(k + 1));
    }
  }
  return out;
}

}  // namespace

TEST("products of all sizes around a block are those of plain loops") {
  for (const std::size_t m : {1u, 3u, 4u, 5u, 9u}) {
    for (const std::size_t n : {1u, 2u, 7u, 8u, 9u, 64u, 75u}) {
      for (const std::size_t k : {1u, 2u, 7u, 8u, 9u, 16u, 31u}) {
        for (const bool by_column : {false, true}) product(m, n, k, by_column, (m + n + k) % 2 == 0);
      }
    }
  }
}

TEST("a row has the same bits alone, among others and on every instruction set") {
  const std::size_t m = 7, n = 13, k = 45;
  const std::vector<float> a = numbers(m * k, 1), b = numbers(n * k, 2), bias = numbers(n, 3);
  std::vector<float> first(m * n);
  for (const bool by_column : {false, true}) {
    for (const Kernels* kernels : all_kernels()) {
      std::vector<float> out(m * n), alone(m * n);
      MatrixProduct p{m, n, k, a.data(), k, 1, b.data(), by_column ? 1 : k, by_column ? n : 1, bias.data(), 0, 1, out.data(), n, 1};
      const auto multiply = by_column ? kernels->column_product : kernels->dot_product;
      multiply(p);
      p.m = 1;
      for (std::size_t i = 0; i < m; ++i) {
        p.a = a.data() + i * k, p.out = alone.data() + i * n;
        multiply(p);
      }
      CHECK(out == alone);
      if (kernels == all_kernels().front()) first = out;
      CHECK(out == first);
    }
  }
}

TEST("elements are mapped along any strides, and broadcast") {
  std::vector<float> x = numbers(24), y = numbers(4, 2), out(24, 9);
  // x [2, 3, 4] transposed to [4, 3, 2], plus y [4, 1, 1], and the square of that.
  const Step add{DenseOp::kAdd, {4, 3, 2}, {{3, 0, {6, 2, 1}}, {0, 0, {1, 4, 12}}, {1, 0, {1, 0, 0}}}};
  const Step square{DenseOp::kSquare, {24}, {{2, 0, {1}}, {3, 0, {1}}}};
  run(DenseExecutor({{24}, {4}, {24}, {24}}, 2, 1, {add, square}), {x.data(), y.data(), out.data()});
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < 3; ++j) {
      for (std::size_t k = 0; k < 2; ++k) {
        const float sum = x[k * 12 + j * 4 + i] + y[i];
        CHECK_EQ(out[i * 6 + j * 2 + k], sum * sum);
      }
    }
  }
}

TEST("every function of one and two numbers") {
  const auto one = [](DenseOp op, float x) {
    float out = 9;
    run(DenseExecutor({{1}, {1}}, 1, 1, {{op, {}, {{1, 0, {}}, {0, 0, {}}}}}), {&x, &out});
    return out;
  };
  const auto two = [](DenseOp op, float x, float y) {
    float out = 9;
    run(DenseExecutor({{1}, {1}, {1}}, 2, 1, {{op, {}, {{2, 0, {}}, {0, 0, {}}, {1, 0, {}}}}}), {&x, &y, &out});
    return out;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK_EQ(one(DenseOp::kCopy, 3), 3.0f);
  CHECK_EQ(one(DenseOp::kNeg, 3), -3.0f);
  CHECK_EQ(one(DenseOp::kAbs, -3), 3.0f);
  CHECK_EQ(one(DenseOp::kRelu, -3), 0.0f);
  CHECK_EQ(one(DenseOp::kRelu, 3), 3.0f);
  CHECK(std::isnan(one(DenseOp::kRelu, nan)));
  CHECK_EQ(one(DenseOp::kSigmoid, 0), 0.5f);
  CHECK_NEAR(one(DenseOp::kTanh, 1), std::tanh(1.0), 1e-7);
  CHECK_NEAR(one(DenseOp::kExp, 1), std::exp(1.0), 1e-6);
  CHECK_NEAR(one(DenseOp::kLog, 2), std::log(2.0), 1e-7);
  CHECK_NEAR(one(DenseOp::kLog1p, 2), std::log(3.0), 1e-6);
  CHECK_EQ(one(DenseOp::kSqrt, 4), 2.0f);
  CHECK_EQ(one(DenseOp::kRsqrt, 4), 0.5f);
  CHECK_EQ(one(DenseOp::kReciprocal, 4), 0.25f);
  CHECK_NEAR(one(DenseOp::kErf, 1), std::erf(1.0), 1e-6);
  CHECK_EQ(one(DenseOp::kSquare, 3), 9.0f);
  CHECK_NEAR(one(DenseOp::kCos, 1), std::cos(1.0), 1e-6);
  CHECK_NEAR(one(DenseOp::kSin, 1), std::sin(1.0), 1e-6);
  CHECK_EQ(two(DenseOp::kAdd, 3, 2), 5.0f);
  CHECK_EQ(two(DenseOp::kSub, 3, 2), 1.0f);
  CHECK_EQ(two(DenseOp::kMul, 3, 2), 6.0f);
  CHECK_EQ(two(DenseOp::kDiv, 3, 2), 1.5f);
  CHECK_EQ(two(DenseOp::kPow, 3, 2), 9.0f);
  CHECK_EQ(two(DenseOp::kMax, 3, 2), 3.0f);
  CHECK_EQ(two(DenseOp::kMin, 3, 2), 2.0f);
  for (const DenseOp op : {DenseOp::kMax, DenseOp::kMin}) {
    CHECK(std::isnan(two(op, nan, 2)));
    CHECK(std::isnan(two(op, 2, nan)));
  }
}

TEST("reductions over rows, columns and everything") {
  for (const std::size_t n : {1u, 5u, 16u, 17u, 40u}) {
    std::vector<float> x = numbers(3 * n), columns(n), rows(3), largest(1);
    const std::vector<Step> steps = {{DenseOp::kSum, {3, n}, {{1, 0, {0, 1}}, {0, 0, {n, 1}}}},
                                     {DenseOp::kSum, {3, n}, {{2, 0, {1, 0}}, {0, 0, {n, 1}}}},
                                     {DenseOp::kAmax, {3, n}, {{3, 0, {0, 0}}, {0, 0, {n, 1}}}}};
    run(DenseExecutor({{3 * n}, {n}, {3}, {1}}, 1, 3, steps), {x.data(), columns.data(), rows.data(), largest.data()});
    for (std::size_t j = 0; j < n; ++j) CHECK_NEAR(columns[j], x[j] + x[n + j] + x[2 * n + j], 1e-5);
    for (std::size_t i = 0; i < 3; ++i) {
      double sum = 0;
      for (std::size_t j = 0; j < n; ++j) sum += x[i * n + j];
      CHECK_NEAR(rows[i], sum, 1e-4);
    }
    CHECK_EQ(largest[0], *std::max_element(x.begin(), x.end()));
  }
}

TEST("a selection reads no index outside of its source") {
  std::vector<float> x = numbers(12), out(8);
  std::vector<std::int64_t> index = {2, 0};
  // x [3, 4] by rows.
  const DenseExecutor executor({{12}, {2, true}, {8}}, 2, 1, {{DenseOp::kSelect, {2, 4, 3}, {{2, 0, {4, 1, 0}}, {0, 0, {0, 1, 4}}, {1, 0, {1, 0, 0}}}}});
  run(executor, {x.data(), index.data(), out.data()});
  for (std::size_t j = 0; j < 4; ++j) {
    CHECK_EQ(out[j], x[8 + j]);
    CHECK_EQ(out[4 + j], x[j]);
  }
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{-1}, std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
    index[1] = bad;
    CHECK_THROWS(run(executor, {x.data(), index.data(), out.data()}), InvalidArgument);
  }
}

TEST("what does not fit its buffers is refused") {
  const auto refused = [](const std::vector<DenseExecutor::Buffer>& buffers, std::size_t given, std::size_t outputs, const Step& step) {
    CHECK_THROWS(DenseExecutor(buffers, given, outputs, {step}), InvalidArgument);
  };
  constexpr std::size_t kHuge = SIZE_MAX;
  const Step copy{DenseOp::kCopy, {4}, {{1, 0, {1}}, {0, 0, {1}}}};
  static_cast<void>(DenseExecutor({{4}, {4}}, 1, 1, {copy}));
  refused({{3}, {4}}, 1, 1, copy);
  refused({{4}, {3}}, 1, 1, copy);
  refused({{4}, {4}}, 2, 0, copy);               // writes to what is given
  refused({{4, true}, {4}}, 1, 1, copy);         // of another type
  refused({{4}, {4, true}}, 1, 1, copy);
  refused({{4}, {4}}, 3, 0, copy);               // more are given than there are
  refused({{4}, {4}}, 1, kHuge, copy);
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {2, 0, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {0, 0, {1}}, {0, 0, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1, 1}}, {0, 0, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {0, 1, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {0, kHuge, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {0}, {{1, 0, {1}}, {0, 5, {1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {0, 0, {kHuge}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {0, 0, {kHuge / 3 + 1}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, {kHuge, kHuge}, {{1, 0, {0, 0}}, {0, 0, {0, 0}}}});
  refused({{4}, {4}}, 1, 1, {DenseOp::kCopy, std::vector<std::size_t>(9, 1), {{1, 0, std::vector<std::size_t>(9)}, {0, 0, std::vector<std::size_t>(9)}}});
  refused({{4}, {4}}, 1, 1, {static_cast<DenseOp>(200), {4}, {{1, 0, {1}}, {0, 0, {1}}}});
  // Scratch that nothing has written, and too much of it.
  refused({{4}, {4}, {4}}, 1, 1, {DenseOp::kCopy, {4}, {{1, 0, {1}}, {2, 0, {1}}}});
  refused({{4}, {4}, {DenseExecutor::kMaxScratch + 1}}, 1, 1, {DenseOp::kCopy, {4}, {{2, 0, {1}}, {0, 0, {1}}}});
  refused({{4}, {4}, {kHuge}}, 1, 1, {DenseOp::kCopy, {4}, {{2, 0, {1}}, {0, 0, {1}}}});
  // A result that moves along k, and operands that move where they must not.
  refused({{8}, {8}, {8}}, 2, 1, {DenseOp::kProduct, {2, 2, 2}, {{2, 0, {2, 1, 1}}, {0, 0, {2, 0, 1}}, {1, 0, {0, 2, 1}}}});
  refused({{8}, {8}, {8}}, 2, 1, {DenseOp::kProduct, {2, 2, 2}, {{2, 0, {2, 1, 0}}, {0, 0, {2, 1, 1}}, {1, 0, {0, 2, 1}}}});
  refused({{8}, {8}, {8}}, 2, 1, {DenseOp::kProduct, {2, 2}, {{2, 0, {2, 0}}, {0, 0, {0, 1}}, {1, 0, {2, 1}}}});
  std::vector<float> x(4), out(4);
  CHECK_THROWS(run(DenseExecutor({{4}, {4}}, 1, 1, {copy}), {x.data()}), InvalidArgument);
  CHECK_THROWS(DenseExecutor({{4}, {4}}, 1, 1, std::vector<Step>(DenseExecutor::kMaxSteps + 1, copy)), InvalidArgument);
}

TEST("scratch buffers that live together do not overlap, and others share memory") {
  // x + 0, (x + 0) + x, ...: each needs the one before only.
  const std::size_t n = 1000, count = 700;
  std::vector<float> x = numbers(n), out(n);
  std::vector<DenseExecutor::Buffer> buffers = {{n}, {n}};
  std::vector<Step> steps = {{DenseOp::kCopy, {n}, {{2, 0, {1}}, {0, 0, {1}}}}};
  for (std::size_t i = 0; i < count; ++i) {
    buffers.push_back({n});
    if (i > 0) steps.push_back({DenseOp::kAdd, {n}, {{2 + i, 0, {1}}, {1 + i, 0, {1}}, {0, 0, {1}}}});
  }
  steps.push_back({DenseOp::kCopy, {n}, {{1, 0, {1}}, {1 + count, 0, {1}}}});
  run(DenseExecutor(buffers, 1, 1, steps), {x.data(), out.data()});
  for (std::size_t i = 0; i < n; ++i) CHECK_NEAR(out[i], x[i] * count, 1e-4 * count);
}

TEST("a step without elements does nothing") {
  float out = 9;
  const Step sum{DenseOp::kSum, {0, 1}, {{1, 0, {0, 1}}, {0, 0, {1, 1}}}};
  run(DenseExecutor({{0}, {1}}, 1, 1, {sum}), {nullptr, &out});
  CHECK_EQ(out, 9.0f);
}

TEST("many threads run one executor") {
  const std::size_t n = 500;
  const std::vector<Step> steps = {{DenseOp::kSquare, {n}, {{2, 0, {1}}, {0, 0, {1}}}}, {DenseOp::kNeg, {n}, {{1, 0, {1}}, {2, 0, {1}}}}};
  const DenseExecutor executor({{n}, {n}, {n}}, 1, 1, steps);
  std::vector<std::vector<float>> outs(4, std::vector<float>(n));
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < outs.size(); ++t) {
    threads.emplace_back([&, t] {
      std::vector<float> x = numbers(n, t);
      for (int i = 0; i < 200; ++i) run(executor, {x.data(), outs[t].data()});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (unsigned t = 0; t < outs.size(); ++t) {
    const std::vector<float> x = numbers(n, t);
    for (std::size_t i = 0; i < n; ++i) CHECK_EQ(outs[t][i], -x[i] * x[i]);
  }
}
