#include "monolith/bucket_scan.h"

#include <string>

#include "monolith/error.h"
#include "row_filter.h"

namespace monolith {

BucketScan::BucketScan(const Table& table, BucketRange buckets) : table_(table), buckets_(buckets) {
  check_buckets(buckets);
  if (buckets.first < buckets.last) cursor_ = Cursor::at(BucketRange::first_hash(buckets.first));
}

bool BucketScan::next(RowBatch& batch) {
  if (buckets_.first == buckets_.last) return false;
  if (buckets_.last < kBuckets && cursor_ >= Cursor::at(BucketRange::first_hash(buckets_.last))) return false;
  const std::size_t before = batch.ids.size();
  if (!table_.scan(cursor_, batch)) return false;
  // The first and the last block may reach beyond the buckets.
  if (!buckets_.all()) {
    filter_rows(table_.row_bytes(), batch, before, [&](std::int64_t id, std::uint32_t) { return buckets_.contains(id); });
  }
  return true;
}

void check_buckets(BucketRange buckets) {
  if (buckets.first <= buckets.last && buckets.last <= kBuckets) return;
  throw InvalidArgument("buckets: expected 0 <= first <= last <= " + std::to_string(kBuckets) + ", got " +
                        std::to_string(buckets.first) + " and " + std::to_string(buckets.last));
}

}  // namespace monolith
