// The memory of rows: numbers in runs of eight, addresses that neither overlap nor move, and an end that is refused, not passed.
#include "row_region.h"

#include <cstring>
#include <new>
#include <set>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "monolith/error.h"
#include "row_pool.h"

namespace {

using namespace monolith;

constexpr std::uint32_t kRowBytes = 20;

}  // namespace

TEST("runs of rows have numbers of their own, never 0") {
  RowRegion region(kRowBytes);
  std::uint64_t last = 1;
  for (std::uint32_t rows = RowRegion::kRun; rows < 4096; rows += RowRegion::kRun) {
    const std::uint32_t first = region.take(rows);
    REQUIRE(first >= last);
    CHECK_EQ(first % RowRegion::kRun, 0u);
    std::memset(region.at(first), 1, rows * kRowBytes);  // all of it can be written
    last = first + rows;
  }
  CHECK_EQ(region.numbers(), last);
}

TEST("rows stay where they are when further segments come") {
  RowRegion region(kRowBytes);
  std::vector<std::pair<std::uint32_t, std::byte*>> rows;
  while (region.numbers() < 3 * RowAddresses::kSegmentRows) {
    const std::uint32_t first = region.take(1u << 19);
    std::memcpy(region.at(first), &first, sizeof(first));
    const std::uint32_t end = first + (1u << 19) - 1;
    std::memcpy(region.at(end), &end, sizeof(end));
    rows.push_back({first, region.at(first)});
    rows.push_back({end, region.at(end)});
  }
  std::set<std::byte*> places;
  for (const auto& [number, place] : rows) {
    std::uint32_t stored = 0;
    std::memcpy(&stored, place, sizeof(stored));
    CHECK_EQ(stored, number);
    CHECK(region.at(number) == place);
    places.insert(place);
  }
  CHECK_EQ(places.size(), rows.size());
}

TEST("only rows that were handed out take memory, and release gives it back") {
  RowRegion region(kRowBytes);
  CHECK(region.bytes() <= 64u << 10);
  region.take(1u << 20);
  CHECK(region.bytes() >= kRowBytes << 20);
  CHECK(region.bytes() <= (kRowBytes << 20) + (4u << 20));
  region.release();
  CHECK(region.bytes() <= 64u << 10);
  std::memset(region.at(region.take(8)), 1, 8 * kRowBytes);
}

TEST("2^32 row numbers are all there are") {
  RowRegion region(4);
  std::uint64_t taken = 0;
  bool refused = false;
  while (!refused) {
    try {
      // No memory is touched, and the system gives addresses freely.
      region.take(static_cast<std::uint32_t>(RowAddresses::kSegmentRows - RowRegion::kRun));
      ++taken;
    } catch (const InvalidArgument&) {
      refused = true;
    }
  }
  CHECK_EQ(taken, RowAddresses::kSegments - 1);  // the first segment is a small one
}

TEST("more rows than there can be memory for are refused at once") {
  RowRegion region(1024);
  for (const std::uint64_t rows : {std::uint64_t{1} << 31, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    bool refused = false;
    try {
      region.check_room(rows);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
  CHECK(region.take(8) != 0);
}

TEST("a region that gets no memory is as it was") {
  const auto make = [] { return std::make_unique<RowRegion>(kRowBytes); };
  std::uint32_t first = 0;
  const auto failed = failing_new::each_allocation(
      make, [&](auto& region) { first = region->take(100'000); },
      [&](auto& region) {
        CHECK_EQ(region->numbers(), RowRegion::kRun);
        std::memset(region->at(region->take(8)), 1, 8 * kRowBytes);
      });
  CHECK(failed > 0);
  CHECK(first != 0);
}

TEST("a freed row is the next to be handed out") {
  RowRegion region(kRowBytes);
  RowPool pool(region);
  std::set<std::uint32_t> rows;
  for (int i = 0; i < 1000; ++i) rows.insert(pool.allocate());
  CHECK_EQ(rows.size(), 1000u);
  pool.free(*rows.begin());
  CHECK_EQ(pool.allocate(), *rows.begin());
  CHECK(!rows.contains(pool.allocate()));
}
