// Row numbers handed out twice would be two ids in one row. Numbers that are not used again would be memory that an expiring
// table never gets back.
#include "row_pool.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "check.h"

namespace {

using monolith::RowPool;
using monolith::RowRegion;

constexpr std::uint32_t kRowBytes = 24;

void mark(const RowPool& pool, std::uint32_t row, std::uint32_t value) {
  for (std::uint32_t i = 0; i < kRowBytes / 4; ++i) std::memcpy(pool.at(row) + 4 * i, &value, 4);
}

bool is_marked(const RowPool& pool, std::uint32_t row, std::uint32_t value) {
  for (std::uint32_t i = 0; i < kRowBytes / 4; ++i) {
    if (std::memcmp(pool.at(row) + 4 * i, &value, 4) != 0) return false;
  }
  return true;
}

}  // namespace

TEST("numbers are never 0 and never in use twice") {
  RowRegion region(kRowBytes);
  RowPool pool(region);
  std::mt19937 random(1);
  std::vector<std::uint32_t> used;
  std::set<std::uint32_t> in_use;
  for (int step = 0; step < 20000; ++step) {
    if (used.empty() || random() % 5 < 3) {
      const std::uint32_t row = pool.allocate();
      REQUIRE(row != 0);
      REQUIRE(in_use.insert(row).second);
      mark(pool, row, row);
      used.push_back(row);
    } else {
      const std::size_t at = random() % used.size();
      const std::uint32_t row = used[at];
      REQUIRE(is_marked(pool, row, row));
      pool.free(row);
      in_use.erase(row);
      used[at] = used.back();
      used.pop_back();
    }
  }
  for (const std::uint32_t row : used) REQUIRE(is_marked(pool, row, row));
}

TEST("freed rows are used again before new memory is taken") {
  RowRegion region(kRowBytes);
  RowPool pool(region);
  std::vector<std::uint32_t> rows;
  for (int i = 0; i < 1000; ++i) rows.push_back(pool.allocate());
  const std::uint64_t numbers = region.numbers();
  for (const std::uint32_t row : rows) pool.free(row);
  std::set<std::uint32_t> again;
  for (int i = 0; i < 1000; ++i) again.insert(pool.allocate());
  CHECK(again == std::set<std::uint32_t>(rows.begin(), rows.end()));
  CHECK_EQ(region.numbers(), numbers);
}

TEST("the pools of a region share its numbers without sharing rows") {
  RowRegion region(kRowBytes);
  std::vector<std::unique_ptr<RowPool>> pools;
  for (int i = 0; i < 5; ++i) pools.push_back(std::make_unique<RowPool>(region));
  std::set<std::uint32_t> all;
  for (int round = 0; round < 700; ++round) {
    for (auto& pool : pools) REQUIRE(all.insert(pool->allocate()).second);
  }
  // Bits of eight rows are a byte, which must belong to one shard alone.
  std::vector<std::set<std::uint32_t>> bytes(5);
  for (std::size_t p = 0; p < 5; ++p) {
    for (int i = 0; i < 100; ++i) bytes[p].insert(pools[p]->allocate() / RowRegion::kRun);
  }
  for (std::size_t p = 0; p < 5; ++p) {
    for (std::size_t q = 0; q < p; ++q) {
      std::vector<std::uint32_t> both;
      std::set_intersection(bytes[p].begin(), bytes[p].end(), bytes[q].begin(), bytes[q].end(), std::back_inserter(both));
      CHECK(both.empty());
    }
  }
}

TEST("little memory waits unused") {
  RowRegion region(kRowBytes);
  RowPool pool(region);
  constexpr std::uint64_t kRows = 100000;
  for (std::uint64_t i = 0; i < kRows; ++i) pool.allocate();
  CHECK(region.numbers() <= kRows + kRows / 32 + 2 * RowRegion::kRun);
}

TEST("a pool that was cleared begins again") {
  RowRegion region(kRowBytes);
  RowPool pool(region);
  for (int i = 0; i < 500; ++i) pool.free(pool.allocate());
  for (int i = 0; i < 500; ++i) pool.allocate();
  pool.clear();
  region.release();
  std::set<std::uint32_t> rows;
  for (int i = 0; i < 500; ++i) REQUIRE(rows.insert(pool.allocate()).second);
  CHECK(rows.count(0) == 0);
}
