// Pooled sums feed the model: a column left out at an odd dim, an empty bag that gives NaN (as in the original's mean), or a
// gradient by another count would train wrong without an error.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/ragged.h"

using monolith::Reduction;
using Floats = std::vector<float>;
using Splits = std::vector<std::int64_t>;

namespace {

constexpr Reduction kAll[] = {Reduction::kSum, Reduction::kMean, Reduction::kSqrtN, Reduction::kL2};

struct Case {
  std::size_t dim;
  Splits splits{0};
  Floats rows;
  std::size_t bags() const { return splits.size() - 1; }
};

Case random_case(std::mt19937_64& random, std::size_t dim) {
  std::normal_distribution<float> normal;
  Case test{dim, {0}, {}};
  for (int bag = 0; bag < 20; ++bag) test.splits.push_back(test.splits.back() + static_cast<std::int64_t>(random() % 6));
  test.rows.resize(test.splits.back() * dim);
  for (float& x : test.rows) x = normal(random);
  return test;
}

// One element at a time, in float and in the order of the rows, as the header promises.
Floats expected_pool(Reduction reduction, const Case& test) {
  Floats out(test.bags() * test.dim, 0.0f);
  for (std::size_t bag = 0; bag < test.bags(); ++bag) {
    const auto n = static_cast<float>(test.splits[bag + 1] - test.splits[bag]);
    for (std::size_t k = 0; k < test.dim; ++k) {
      float& sum = out[bag * test.dim + k];
      for (std::int64_t value = test.splits[bag]; value < test.splits[bag + 1]; ++value) {
        const float x = test.rows[value * test.dim + k];
        sum = sum + (reduction == Reduction::kL2 ? x * x : x);
      }
      if (n == 0) continue;
      if (reduction == Reduction::kMean) sum = sum / n;
      if (reduction == Reduction::kSqrtN) sum = sum / std::sqrt(n);
      if (reduction == Reduction::kL2) sum = std::sqrt(sum);
    }
  }
  return out;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Floats pool(Reduction reduction, const Case& test) {
  Floats out(test.bags() * test.dim, NAN);
  monolith::pool(reduction, test.rows, test.splits, test.dim, out);
  return out;
}

}  // namespace

TEST("every reduction at every dim up to 140 equals the plain loop, bit for bit") {
  std::mt19937_64 random(1);
  for (std::size_t dim = 1; dim <= 140; ++dim) {
    const Case test = random_case(random, dim);
    for (const Reduction reduction : kAll) CHECK(same_bits(pool(reduction, test), expected_pool(reduction, test)));
  }
}

TEST("an empty bag gives zeros, never NaN") {
  for (const Reduction reduction : kAll) {
    const Case test{3, {0, 0, 0}, {}};
    for (const float x : pool(reduction, test)) CHECK_EQ(x, 0.0f);
  }
}

TEST("the gradient agrees with finite differences of the pooled value") {
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal;
  for (const std::size_t dim : {1u, 3u, 8u, 17u}) {
    for (const Reduction reduction : kAll) {
      Case test = random_case(random, dim);
      Floats grad_out(test.bags() * dim);
      for (float& g : grad_out) g = normal(random);
      Floats grad_rows(test.rows.size(), NAN);
      monolith::pool_gradient(reduction, grad_out, test.rows, pool(reduction, test), test.splits, dim, grad_rows);
      const auto loss = [&] {
        const Floats out = pool(reduction, test);
        double sum = 0;
        for (std::size_t i = 0; i < out.size(); ++i) sum += static_cast<double>(out[i]) * static_cast<double>(grad_out[i]);
        return sum;
      };
      for (std::size_t i = 0; i < test.rows.size(); i += 5) {
        const float x = test.rows[i];
        constexpr float kStep = 1e-2f;
        test.rows[i] = x + kStep;
        const double above = loss();
        test.rows[i] = x - kStep;
        const double below = loss();
        test.rows[i] = x;
        CHECK_NEAR((above - below) / (2 * static_cast<double>(kStep)), grad_rows[i], 2e-2);
      }
    }
  }
}

TEST("the gradient at every dim equals the plain loop, bit for bit, and needs neither rows nor pooled but for l2") {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (std::size_t dim = 1; dim <= 140; ++dim) {
    const Case test = random_case(random, dim);
    Floats grad_out(test.bags() * dim);
    for (float& g : grad_out) g = normal(random);
    for (const Reduction reduction : {Reduction::kSum, Reduction::kMean, Reduction::kSqrtN}) {
      Floats expected(test.rows.size());
      for (std::size_t bag = 0; bag < test.bags(); ++bag) {
        const auto n = static_cast<float>(test.splits[bag + 1] - test.splits[bag]);
        const float by = reduction == Reduction::kSum ? 1.0f : reduction == Reduction::kMean ? n : std::sqrt(n);
        for (std::int64_t value = test.splits[bag]; value < test.splits[bag + 1]; ++value) {
          for (std::size_t k = 0; k < dim; ++k) expected[value * dim + k] = grad_out[bag * dim + k] / by;
        }
      }
      Floats grad_rows(test.rows.size(), NAN);
      monolith::pool_gradient(reduction, grad_out, {}, {}, test.splits, dim, grad_rows);
      CHECK(same_bits(grad_rows, expected));
    }
  }
}

TEST("l2: the gradient is g * x / norm, and 0 where the norm is 0") {
  const Floats rows{3, 0, 4, 0};
  const Splits splits{0, 2};
  Floats out(2);
  monolith::pool(Reduction::kL2, rows, splits, 2, out);
  CHECK(out == (Floats{5, 0}));
  Floats grad_rows(4, NAN);
  monolith::pool_gradient(Reduction::kL2, Floats{10, 10}, rows, out, splits, 2, grad_rows);
  CHECK(grad_rows == (Floats{6, 0, 8, 0}));
}

TEST("sizes that disagree are refused") {
  Floats out(2);
  const Splits splits{0, 2};
  CHECK_THROWS(monolith::pool(Reduction::kSum, Floats(4), splits, 0, out), monolith::InvalidArgument);
  CHECK_THROWS(monolith::pool(Reduction::kSum, Floats(5), splits, 2, out), monolith::InvalidArgument);
  CHECK_THROWS(monolith::pool(Reduction::kSum, Floats(6), splits, 2, out), monolith::InvalidArgument);
  CHECK_THROWS(monolith::pool(Reduction::kSum, Floats(4), (Splits{0, 1, 2}), 2, out), monolith::InvalidArgument);
  Floats grads(4);
  CHECK_THROWS(monolith::pool_gradient(Reduction::kL2, Floats(2), {}, {}, splits, 2, grads), monolith::InvalidArgument);
  CHECK_THROWS(monolith::pool_gradient(Reduction::kSum, Floats(3), {}, {}, splits, 2, grads), monolith::InvalidArgument);
}
