// An initial value is a pure function of seed, table name, id and position. If it depended on anything else, a row would change
// its value when it is inserted, or differ between two servers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "check.h"
#include "tables.h"

namespace {

using monolith::Initializer;
using monolith::InitializerKind;
using monolith::Table;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

monolith::TableConfig config(Initializer initializer, std::uint32_t dim = 16) {
  auto config = tables::config(monolith::OptimizerKind::kAdagrad, dim);
  config.segments[0].initializer = initializer;
  return config;
}

Floats values(const Table& table, const Ids& ids) {
  Floats out(ids.size() * table.dim());
  table.lookup(ids, out.data());
  return out;
}

Ids numbers(std::int64_t n) {
  Ids ids;
  for (std::int64_t id = 0; id < n; ++id) ids.push_back(id * 31 - n);
  return ids;
}

const Initializer kAll[] = {{InitializerKind::kConstant, 0.25f, 0},
                            {InitializerKind::kUniform, -0.5f, 2.0f},
                            {InitializerKind::kNormal, 1.0f, 0.5f},
                            {InitializerKind::kTruncatedNormal, -1.0f, 0.1f}};

}  // namespace

TEST("an id reads the same before and after it gets a row, in any order and batch") {
  for (const Initializer& initializer : kAll) {
    for (const std::uint32_t dim : {1u, 5u, 16u, 300u}) {
      Table table(config(initializer, dim));
      Ids ids = numbers(100);
      const Floats before = values(table, ids);
      std::vector<std::int32_t> existed(ids.size());
      table.reinitialize(ids, 1, existed.data());
      CHECK(values(table, ids) == before);
      CHECK_EQ(table.size(), ids.size());
      for (std::size_t i = 0; i < ids.size(); i += 9) {
        const Floats one = values(table, {ids[i]});
        CHECK(std::equal(one.begin(), one.end(), before.begin() + static_cast<std::ptrdiff_t>(i * dim)));
      }
    }
  }
}

TEST("other seeds, names and ids give other values, tables with the same give the same") {
  const Initializer uniform{InitializerKind::kUniform, 0.0f, 1.0f};
  const Ids ids = numbers(50);
  const Floats first = values(Table(config(uniform)), ids);
  CHECK(values(Table(config(uniform)), ids) == first);
  auto other = config(uniform);
  other.seed = 1;
  CHECK(values(Table(other), ids) != first);
  other = config(uniform);
  other.name = "other";
  CHECK(values(Table(other), ids) != first);
  std::set<float> distinct(first.begin(), first.end());
  CHECK(distinct.size() > first.size() * 99 / 100);
}

TEST("a segment continues where the one before it ended") {
  const Initializer uniform{InitializerKind::kUniform, 0.0f, 1.0f};
  auto halves = config(uniform, 8);
  halves.segments.push_back(halves.segments[0]);
  const Ids ids = numbers(20);
  CHECK(values(Table(halves), ids) == values(Table(config(uniform, 16)), ids));
}

TEST("values are within their bounds and have the moments asked for") {
  const Ids ids = numbers(4000);
  for (const Initializer& initializer : kAll) {
    const Floats drawn = values(Table(config(initializer)), ids);
    double sum = 0, square = 0;
    for (const float x : drawn) {
      REQUIRE(std::isfinite(x));
      sum += x;
      square += double{x} * x;
      if (initializer.kind == InitializerKind::kUniform) REQUIRE(x >= initializer.a && x < initializer.b);
      if (initializer.kind == InitializerKind::kConstant) REQUIRE(x == initializer.a);
      if (initializer.kind == InitializerKind::kTruncatedNormal) REQUIRE(std::abs(x - initializer.a) <= 2.0001f * initializer.b);
    }
    const double n = static_cast<double>(drawn.size());
    const double mean = sum / n, deviation = std::sqrt(std::max(0.0, square / n - mean * mean));
    const bool uniform = initializer.kind == InitializerKind::kUniform;
    const double expected_mean = uniform ? (initializer.a + initializer.b) / 2 : initializer.a;
    // A normal cut at two deviations has 0.8796 of the deviation.
    const double expected_deviation = initializer.kind == InitializerKind::kConstant ? 0
                                      : uniform                                      ? (initializer.b - initializer.a) / std::sqrt(12.0)
                                      : initializer.kind == InitializerKind::kNormal ? initializer.b
                                                                                     : 0.8796 * initializer.b;
    CHECK_NEAR(mean, expected_mean, 5 * expected_deviation / std::sqrt(n) + 1e-6);
    CHECK_NEAR(deviation, expected_deviation, 0.02 * expected_deviation + 1e-6);
  }
}

TEST("a uniform value never reaches the end of its range, however narrow that is") {
  const float low = 1.0f, high = std::nextafter(1.0f, 2.0f);
  for (const float x : values(Table(config({InitializerKind::kUniform, low, high})), numbers(500))) REQUIRE(x == low);
}
