// A pooled lookup against its definition: the rows of each bag added in order. Dims have kernels of their own, so a mistake in
// one would be seen by the models of that dim alone.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::Pooling;
using monolith::Table;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

std::unique_ptr<Table> make(std::uint32_t dim, bool unseen_reads_zeros = false) {
  auto config = tables::config(monolith::OptimizerKind::kSgd, dim);
  config.segments[0].initializer = {monolith::InitializerKind::kUniform, -1.0f, 1.0f};
  config.unseen_reads_zeros = unseen_reads_zeros;
  auto table = std::make_unique<Table>(config);
  Ids ids;
  for (std::int64_t id = 0; id < 300; ++id) ids.push_back(id * 7 - 900);
  std::mt19937 random(dim);
  std::normal_distribution<float> normal;
  Floats values(ids.size() * dim);
  for (float& value : values) value = normal(random);
  table->assign(ids, values.data(), 1);
  return table;
}

Floats defined(const Table& table, const Ids& ids, const Ids& splits, Pooling pooling) {
  const std::size_t dim = table.dim();
  Floats rows(ids.size() * dim);
  table.lookup(ids, rows.data());
  Floats out((splits.size() - 1) * dim, 0.0f);
  for (std::size_t bag = 0; bag + 1 < splits.size(); ++bag) {
    const auto first = static_cast<std::size_t>(splits[bag]), last = static_cast<std::size_t>(splits[bag + 1]);
    for (std::size_t d = 0; d < dim && first < last; ++d) {
      float sum = rows[first * dim + d];
      for (std::size_t i = first + 1; i < last; ++i) sum += rows[i * dim + d];
      const auto n = static_cast<float>(last - first);
      if (pooling == Pooling::kMean) sum *= 1 / n;
      if (pooling == Pooling::kSqrtN) sum *= 1 / std::sqrt(n);
      out[bag * dim + d] = sum;
    }
  }
  return out;
}

bool same(const Floats& a, const Floats& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

}  // namespace

TEST("bags of every size pool as defined, in every dim and way") {
  std::mt19937 random(1);
  for (const std::uint32_t dim : {1u, 2u, 3u, 4u, 7u, 8u, 9u, 15u, 16u, 17u, 31u, 32u, 33u, 48u, 64u, 65u, 100u}) {
    const auto table = make(dim);
    Ids ids, splits = {0};
    for (int bag = 0; bag < 150; ++bag) {
      const std::size_t n = bag % 10 == 0 ? 0 : bag % 17 == 0 ? 90 : random() % 6;
      for (std::size_t i = 0; i < n; ++i) ids.push_back(static_cast<std::int64_t>(random() % 320) * 7 - 900);
      splits.push_back(static_cast<std::int64_t>(ids.size()));
    }
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kSqrtN}) {
      Floats out(150 * dim, 9.0f);
      table->lookup_pooled(ids, splits, pooling, out.data());
      const Floats expected = defined(*table, ids, splits, pooling);
      if (pooling == Pooling::kSum) {
        CHECK(same(out, expected));
      } else {
        for (std::size_t i = 0; i < out.size(); ++i) REQUIRE(std::abs(out[i] - expected[i]) <= 1e-5f * (1 + std::abs(expected[i])));
      }
    }
  }
}

TEST("a bag of one is its row, bit for bit, whatever the pooling") {
  for (const std::uint32_t dim : {3u, 16u}) {
    const auto table = make(dim);
    const Ids ids = {-900, 5000, -893};
    Floats negative_zero(dim, -0.0f);
    table->assign(Ids{5000}, negative_zero.data(), 1);
    Floats rows(3 * dim), pooled(3 * dim);
    table->lookup(ids, rows.data());
    CHECK(std::signbit(rows[dim]));
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kSqrtN}) {
      table->lookup_pooled(ids, Ids{0, 1, 2, 3}, pooling, pooled.data());
      CHECK(same(rows, pooled));
    }
  }
}

TEST("an id that occurs twice in a bag counts twice") {
  const auto table = make(8);
  Floats once(8), twice(8);
  table->lookup(Ids{-900}, once.data());
  table->lookup_pooled(Ids{-900, -900}, Ids{0, 2}, Pooling::kSum, twice.data());
  for (int i = 0; i < 8; ++i) CHECK_EQ(twice[i], once[i] + once[i]);
}

TEST("ids without a row read initial values, or zeros if so configured, and get no row") {
  for (const bool zeros : {false, true}) {
    const auto table = make(16, zeros);
    const std::uint64_t rows = table->size();
    const Ids unseen = {1, 2, 4, 1};
    Floats out(4 * 16, 9.0f), again(4 * 16);
    table->lookup(unseen, out.data());
    table->lookup(unseen, again.data());
    CHECK(same(out, again));
    CHECK_EQ(table->size(), rows);
    bool all_zero = true;
    for (const float x : out) all_zero &= x == 0;
    CHECK_EQ(all_zero, zeros);
    for (int i = 0; i < 16; ++i) CHECK_EQ(out[i], out[3 * 16 + i]);
  }
}

TEST("no bags, no ids, and bags without ids") {
  const auto table = make(4);
  Floats out(8, 9.0f);
  table->lookup({}, out.data());
  table->lookup_pooled({}, Ids{0}, Pooling::kSum, out.data());
  CHECK_EQ(out[0], 9.0f);
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kSqrtN}) {
    out.assign(8, 9.0f);
    table->lookup_pooled({}, Ids{0, 0, 0}, pooling, out.data());
    for (const float x : out) {
      CHECK_EQ(x, 0.0f);
      CHECK(!std::signbit(x));
    }
  }
}

TEST("offsets that do not fit are refused before anything is read") {
  const auto table = make(4);
  const Ids ids = {1, 2, 3};
  Floats out(40, 9.0f);
  for (const Ids& wrong : {Ids{}, Ids{0, 2}, Ids{0, 4}, Ids{1, 3}, Ids{0, 2, 1, 3}, Ids{0, -1, 3}, Ids{0, INT64_MAX, 3}}) {
    CHECK_THROWS(table->lookup_pooled(ids, wrong, Pooling::kSum, out.data()), monolith::InvalidArgument);
  }
  for (const float x : out) CHECK_EQ(x, 9.0f);
}
