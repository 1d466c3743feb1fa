// Files, initial values and shard owners depend on these values. They may change only together with the table file version.
#include <cstdint>

#include "check.h"
#include "monolith/buckets.h"
#include "monolith/hash.h"

TEST("hash values are pinned") {
  CHECK_EQ(monolith::hash_id(0), 0xE220A8397B1DCDAFull);
  CHECK_EQ(monolith::hash_id(1), 0x910A2DEC89025CC1ull);
  CHECK_EQ(monolith::hash_id(-1), 0xE4D971771B652C20ull);
  CHECK_EQ(monolith::hash_id(42), 0xBDD732262FEB6E95ull);
  CHECK_EQ(monolith::hash_id(INT64_MIN), 0x481EC0A212A9F3DBull);
  CHECK_EQ(monolith::hash_id(INT64_MAX), 0x2A67D7552E039EA7ull);
}

TEST("fast_range maps the whole hash range onto [0, n) in order") {
  CHECK_EQ(monolith::fast_range(0, 11), 0u);
  CHECK_EQ(monolith::fast_range(UINT64_MAX, 11), 10u);
  CHECK_EQ(monolith::fast_range(UINT64_MAX / 2, 10), 4u);
}

TEST("buckets are pinned, and are ranges of hashes") {
  CHECK_EQ(monolith::bucket_of(0), 3618u);
  CHECK_EQ(monolith::bucket_of(-1), 3661u);
  CHECK_EQ(monolith::bucket_of(INT64_MIN), 1153u);
  CHECK_EQ(monolith::bucket_of(42, 3), 2u);
  const monolith::BucketRange range{.first = 3618, .last = 3661};
  CHECK(range.contains(0));
  CHECK(!range.contains(-1));
  CHECK(monolith::BucketRange::first_hash(3618) <= monolith::hash_id(0));
  CHECK(monolith::hash_id(0) < monolith::BucketRange::first_hash(3619));
}
