// Workers pool rows that servers sent once for each distinct id, and sum gradients by distinct id. A skipped column, another
// order of additions or an index beyond the rows would train wrongly, or write out of bounds, without an error.
#include "monolith/placed_rows.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/ragged.h"

using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

namespace {

struct Case {
  std::size_t dim;
  Ids splits{0};
  Ids places;
  Floats rows;
  Floats grads;
};

Case random_case(std::mt19937_64& random, std::size_t dim, std::size_t rows) {
  std::normal_distribution<float> normal;
  Case test{dim, {0}, {}, Floats(rows * dim), {}};
  for (int bag = 0; bag < 40; ++bag) test.splits.push_back(test.splits.back() + static_cast<std::int64_t>(random() % 4));
  for (std::int64_t i = 0; i < test.splits.back(); ++i) test.places.push_back(static_cast<std::int64_t>(random() % rows));
  test.grads.resize((test.splits.size() - 1) * dim);
  for (float& x : test.rows) x = normal(random);
  for (float& x : test.grads) x = normal(random);
  return test;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST("pooling by place is gathering, then pooling, to the bit and at any dim") {
  std::mt19937_64 random(1);
  for (const std::size_t dim : {1u, 2u, 3u, 7u, 8u, 16u, 17u, 32u, 64u, 100u}) {
    const Case test = random_case(random, dim, 30);
    Floats spread(test.places.size() * dim);
    monolith::gather_rows(test.rows.data(), 30, dim * sizeof(float), test.places, spread.data());
    Floats expected((test.splits.size() - 1) * dim, 5.0f);
    monolith::pool(monolith::Reduction::kSum, spread, test.splits, dim, expected);
    Floats out(expected.size(), 7.0f);
    monolith::pool_places(test.rows, test.places, test.splits, dim, out);
    CHECK(same_bits(out, expected));
  }
}

TEST("summing by place adds each bag's gradient once for each of its ids, in order; a place without an id is zero") {
  std::mt19937_64 random(2);
  for (const std::size_t dim : {1u, 3u, 8u, 16u, 19u, 64u}) {
    const Case test = random_case(random, dim, 90);
    Floats expected(90 * dim, 0.0f);
    for (std::size_t bag = 0; bag + 1 < test.splits.size(); ++bag) {
      for (std::int64_t i = test.splits[bag]; i < test.splits[bag + 1]; ++i) {
        for (std::size_t k = 0; k < dim; ++k) {
          float& sum = expected[test.places[i] * dim + k];
          sum = sum + test.grads[bag * dim + k];
        }
      }
    }
    Floats out(expected.size(), 7.0f);
    monolith::sum_places(test.grads, test.places, test.splits, dim, out);
    CHECK(same_bits(out, expected));
  }
}

TEST("what does not fit is refused before anything is written") {
  const Floats rows(2 * 3, 1.0f);
  const Ids splits{0, 1, 2};
  Floats out(2 * 3, 7.0f);
  const auto refused = [&](const Ids& places, const Ids& by, std::size_t dim, std::size_t size) {
    Floats short_out(size, 7.0f);
    CHECK_THROWS(monolith::pool_places(rows, places, by, dim, short_out), monolith::InvalidArgument);
    CHECK_THROWS(monolith::sum_places(short_out, places, by, dim, out), monolith::InvalidArgument);
    for (const float x : short_out) REQUIRE(x == 7.0f);
    for (const float x : out) REQUIRE(x == 7.0f);
  };
  refused({0, 2}, splits, 3, 6);
  refused({0, -1}, splits, 3, 6);
  refused({0, INT64_MAX}, splits, 3, 6);
  refused({0, 1}, {0, 1, 3}, 3, 6);
  refused({0, 1}, {0, 2, 1}, 3, 6);
  refused({0, 1}, {}, 3, 6);
  refused({0, 1}, splits, 0, 6);
  refused({0, 1}, splits, 4, 6);
  refused({0, 1}, splits, 3, 5);
}

TEST("no bags and empty bags") {
  Floats none;
  monolith::pool_places(none, {}, Ids{0}, 4, none);
  Floats out(2 * 4, 7.0f);
  monolith::pool_places(none, {}, Ids{0, 0, 0}, 4, out);
  CHECK(out == Floats(8, 0.0f));
  monolith::sum_places(Floats(4), {}, Ids{0, 0}, 4, out);
  CHECK(out == Floats(8, 0.0f));
}
