// Buckets are moved between processes one range after the other: a row that two ranges have would be doubled, a row that none
// has would be lost.
#include "monolith/bucket_scan.h"

#include <unordered_map>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::BucketRange;

std::vector<std::int64_t> fill(monolith::Table& table, std::size_t n) {
  std::vector<std::int64_t> ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = static_cast<std::int64_t>(i * 7919);
  std::vector<std::int32_t> status(n);
  table.reinitialize(ids, 0, status.data());
  return ids;
}

monolith::RowBatch rows_of(const monolith::Table& table, BucketRange buckets) {
  monolith::BucketScan scan(table, buckets);
  monolith::RowBatch batch;
  while (scan.next(batch)) {
  }
  return batch;
}

}  // namespace

TEST("ranges side by side have every row once, and only their own") {
  monolith::Table table(tables::config());
  const std::vector<std::int64_t> ids = fill(table, 30000);
  std::unordered_map<std::int64_t, int> seen;
  const std::uint32_t borders[] = {0, 1, 2, 31, 32, 33, 1000, 4095, monolith::kBuckets};
  for (std::size_t i = 0; i + 1 < std::size(borders); ++i) {
    const BucketRange buckets{borders[i], borders[i + 1]};
    const monolith::RowBatch batch = rows_of(table, buckets);
    CHECK(batch.rows.size() == batch.ids.size() * table.row_bytes());
    CHECK(batch.times.size() == batch.ids.size());
    for (const std::int64_t id : batch.ids) {
      REQUIRE(buckets.contains(id));
      ++seen[id];
    }
  }
  for (const std::int64_t id : ids) REQUIRE(seen[id] == 1);
  CHECK(seen.size() == ids.size());
}

TEST("rows are those of their ids") {
  monolith::Table table(tables::config());
  fill(table, 5000);
  const monolith::RowBatch batch = rows_of(table, {100, 200});
  REQUIRE(!batch.ids.empty());
  const auto found = std::make_unique<bool[]>(batch.ids.size());
  monolith::RowBatch copies;
  table.copy_rows(batch.ids, found.get(), copies);
  CHECK(copies.rows == batch.rows);
}

TEST("no buckets have no rows, and there are no buckets beyond the last") {
  monolith::Table table(tables::config());
  fill(table, 100);
  CHECK(rows_of(table, {7, 7}).ids.empty());
  CHECK(rows_of(table, {monolith::kBuckets, monolith::kBuckets}).ids.empty());
  CHECK_THROWS((monolith::BucketScan(table, {5, 4})), monolith::InvalidArgument);
  CHECK_THROWS((monolith::BucketScan(table, {0, monolith::kBuckets + 1})), monolith::InvalidArgument);
}
