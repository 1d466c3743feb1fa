// Products of pairs feed the model: a pair at another index, a row skipped when their number is odd, or a write past the end
// would train wrongly without an error.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "monolith/error.h"
#include "monolith/pairs.h"
#include "monolith/thread_pool.h"

using monolith::PairShape;
using Floats = std::vector<float>;

namespace {

std::size_t pairs_of(PairShape shape) { return shape.n < 2 ? 0 : shape.n * (shape.n - 1) / 2; }

Floats random_floats(std::size_t size, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  Floats numbers(size);
  for (float& x : numbers) x = normal(random);
  return numbers;
}

struct Results {
  Floats products, gradient, sums, sums_gradient;
  bool operator==(const Results& other) const {
    const auto same = [](const Floats& a, const Floats& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
    };
    return same(products, other.products) && same(gradient, other.gradient) && same(sums, other.sums) &&
           same(sums_gradient, other.sums_gradient);
  }
};

Results by_core(PairShape shape, const Floats& x, const Floats& grads, const Floats& sum_grads) {
  Results results{Floats(shape.batch * pairs_of(shape), NAN), Floats(x.size(), NAN), Floats(shape.batch, NAN), Floats(x.size(), NAN)};
  monolith::dot_pairs(shape, {}, x, results.products);
  monolith::dot_pairs_gradient(shape, {}, x, grads, {}, results.gradient);
  monolith::sum_pairs(shape, x, results.sums);
  monolith::sum_pairs_gradient(shape, x, sum_grads, results.sums_gradient);
  return results;
}

// One float at a time, in the order that the kernels promise: over k for a product, over the other rows for a gradient.
Floats expected_products(PairShape shape, const Floats& x) {
  Floats out;
  for (std::size_t b = 0; b < shape.batch; ++b) {
    for (std::size_t i = 0; i < shape.n; ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        float sum = 0;
        for (std::size_t d = 0; d < shape.k; ++d) {
          sum += x[(b * shape.n + i) * shape.k + d] * x[(b * shape.n + j) * shape.k + d];
        }
        out.push_back(sum);
      }
    }
  }
  return out;
}

Floats expected_gradient(PairShape shape, const Floats& x, const Floats& grads) {
  Floats out;
  for (std::size_t b = 0; b < shape.batch; ++b) {
    for (std::size_t i = 0; i < shape.n; ++i) {
      for (std::size_t d = 0; d < shape.k; ++d) {
        float sum = 0;
        for (std::size_t j = 0; j < shape.n; ++j) {
          if (j == i) continue;
          const std::size_t high = std::max(i, j), low = std::min(i, j);
          sum += grads[b * pairs_of(shape) + high * (high - 1) / 2 + low] * x[(b * shape.n + j) * shape.k + d];
        }
        out.push_back(sum);
      }
    }
  }
  return out;
}

}  // namespace

TEST("products of pairs and their gradients equal the plain loops at every size") {
  for (std::size_t n = 0; n <= 20; ++n) {
    for (std::size_t k = 0; k <= 19; ++k) {
      const PairShape shape{3, n, k};
      const Floats x = random_floats(3 * n * k, 1), grads = random_floats(3 * pairs_of(shape), 2), sum_grads = random_floats(3, 3);
      const Results results = by_core(shape, x, grads, sum_grads);
      CHECK(results.products == expected_products(shape, x));
      CHECK(results.gradient == expected_gradient(shape, x, grads));
      // The sum of all pairs has another formula, so only nearly the same value.
      for (std::size_t b = 0; b < 3; ++b) {
        double sum = 0;
        for (std::size_t p = 0; p < pairs_of(shape); ++p) sum += results.products[b * pairs_of(shape) + p];
        CHECK_NEAR(results.sums[b], sum, 1e-3);
      }
      Floats same_for_all(3 * pairs_of(shape));
      for (std::size_t p = 0; p < same_for_all.size(); ++p) same_for_all[p] = sum_grads[p / pairs_of(shape)];
      const Floats expected = expected_gradient(shape, x, same_for_all);
      for (std::size_t i = 0; i < expected.size(); ++i) CHECK_NEAR(results.sums_gradient[i], expected[i], 1e-4);
    }
  }
}

TEST("a dense vector is the first of the others and comes before the products") {
  for (std::size_t n = 0; n <= 9; ++n) {
    for (std::size_t k = 1; k <= 17; ++k) {
      const PairShape every{700, n + 1, k};
      const std::size_t pairs = pairs_of(every);
      const Floats all = random_floats(700 * (n + 1) * k, 1), grads = random_floats(700 * (k + pairs), 2);
      Floats dense, x, pair_grads;
      for (std::size_t b = 0; b < 700; ++b) {
        const float* const example = all.data() + b * (n + 1) * k;
        dense.insert(dense.end(), example, example + k);
        x.insert(x.end(), example + k, example + (n + 1) * k);
        pair_grads.insert(pair_grads.end(), grads.begin() + b * (k + pairs) + k, grads.begin() + (b + 1) * (k + pairs));
      }
      Floats products(700 * pairs), gradient(all.size());
      monolith::dot_pairs(every, {}, all, products);
      monolith::dot_pairs_gradient(every, {}, all, pair_grads, {}, gradient);
      Floats expected, expected_dense, expected_x;
      for (std::size_t b = 0; b < 700; ++b) {
        expected.insert(expected.end(), dense.begin() + b * k, dense.begin() + (b + 1) * k);
        expected.insert(expected.end(), products.begin() + b * pairs, products.begin() + (b + 1) * pairs);
        const auto example = gradient.begin() + b * (n + 1) * k;
        for (std::size_t d = 0; d < k; ++d) expected_dense.push_back(grads[b * (k + pairs) + d] + example[d]);
        expected_x.insert(expected_x.end(), example + k, example + (n + 1) * k);
      }
      Floats out(expected.size(), NAN), grad_dense(dense.size(), NAN), grad_x(x.size(), NAN);
      monolith::dot_pairs({700, n, k}, dense, x, out);
      monolith::dot_pairs_gradient({700, n, k}, dense, x, grads, grad_dense, grad_x);
      CHECK(out == expected);
      CHECK(grad_dense == expected_dense);
      CHECK(grad_x == expected_x);
    }
  }
}

TEST("products of pairs have the same bits on any number of threads and with every instruction set") {
  const PairShape shape{600, 27, 17};
  const Floats x = random_floats(600 * 27 * 17, 1), grads = random_floats(600 * pairs_of(shape), 2), sum_grads = random_floats(600, 3);
  const std::size_t before = monolith::num_threads();
  monolith::set_num_threads(1);
  const Results alone = by_core(shape, x, grads, sum_grads);
  monolith::set_num_threads(4);
  CHECK(by_core(shape, x, grads, sum_grads) == alone);
  monolith::set_num_threads(before);
  for (const monolith::Kernels* kernels : monolith::all_kernels()) {
    Results results{Floats(alone.products.size()), Floats(x.size()), Floats(600), Floats(x.size())};
    const monolith::PairBatch batch{600, 27, 17, nullptr, x.data()};
    Floats scratch((32 + 27) * 17 + pairs_of(shape) + 8);
    kernels->dot_pairs(batch, results.products.data(), scratch.data());
    kernels->dot_pairs_gradient(batch, grads.data(), nullptr, results.gradient.data(), nullptr);
    kernels->sum_pairs(batch, results.sums.data());
    kernels->sum_pairs_gradient(batch, sum_grads.data(), results.sums_gradient.data());
    CHECK(results == alone);
  }
}

TEST("arrays of another size than the shape says are refused") {
  Floats x(2 * 3 * 4), grad_x(x), products(2 * 3), sums(2), short_by_one(5), dense(2 * 4);
  const PairShape shape{2, 3, 4};
  CHECK_THROWS(monolith::dot_pairs(shape, {}, x, short_by_one), monolith::InvalidArgument);
  CHECK_THROWS(monolith::dot_pairs(shape, {}, short_by_one, products), monolith::InvalidArgument);
  CHECK_THROWS(monolith::dot_pairs(shape, dense, x, products), monolith::InvalidArgument);
  CHECK_THROWS(monolith::dot_pairs(shape, short_by_one, x, products), monolith::InvalidArgument);
  CHECK_THROWS(monolith::dot_pairs_gradient(shape, {}, x, short_by_one, {}, grad_x), monolith::InvalidArgument);
  CHECK_THROWS(monolith::dot_pairs_gradient(shape, {}, x, products, dense, grad_x), monolith::InvalidArgument);
  CHECK_THROWS(monolith::sum_pairs(shape, x, short_by_one), monolith::InvalidArgument);
  CHECK_THROWS(monolith::sum_pairs_gradient(shape, x, sums, short_by_one), monolith::InvalidArgument);
}
