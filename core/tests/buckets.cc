// Which bucket an id is in decides which server owns it and which file it is saved in, for ever. Buckets must cover every id
// once.
#include "monolith/buckets.h"

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "inverse_hash.h"
#include "monolith/bucket_scan.h"
#include "monolith/error.h"
#include "monolith/table.h"

namespace {

using monolith::bucket_of;
using monolith::BucketRange;
using monolith::kBuckets;

}  // namespace

TEST("known ids are in the buckets they were always in") {
  CHECK_EQ(bucket_of(0), 3618u);
  CHECK_EQ(bucket_of(1), 2320u);
  CHECK_EQ(bucket_of(std::int64_t{1} << 62), 10u);
}

TEST("a bucket is a range of hashes, and ranges of buckets are too") {
  for (const std::uint32_t bucket : {0u, 1u, 2047u, 4095u}) {
    const std::uint64_t first = BucketRange::first_hash(bucket);
    const std::uint64_t last = bucket + 1 == kBuckets ? ~std::uint64_t{0} : BucketRange::first_hash(bucket + 1) - 1;
    for (const std::uint64_t hash : {first, first + 1, last - 1, last}) CHECK_EQ(bucket_of(id_with_hash(hash)), bucket);
    if (bucket > 0) CHECK_EQ(bucket_of(id_with_hash(first - 1)), bucket - 1);
  }
}

TEST("every id is in one of any partition of the buckets") {
  std::mt19937_64 random(3);
  const std::vector<BucketRange> parts = {{0, 1}, {1, 1000}, {1000, 1000}, {1000, 4095}, {4095, 4096}};
  for (int i = 0; i < 20000; ++i) {
    const auto id = static_cast<std::int64_t>(random());
    int in = 0;
    for (const BucketRange& part : parts) in += part.contains(id);
    REQUIRE(in == 1);
    REQUIRE(BucketRange{}.contains(id));
    REQUIRE(bucket_of(id) < kBuckets);
  }
  CHECK(BucketRange{}.all());
  CHECK(!(BucketRange{0, 4095}.all()));
}

TEST("buckets are about equally full") {
  std::vector<int> counts(kBuckets);
  constexpr int kIds = 400000;
  for (std::int64_t id = 0; id < kIds; ++id) ++counts[bucket_of(id)];
  for (const int count : counts) CHECK(count > kIds / static_cast<int>(kBuckets) / 2 && count < 2 * kIds / static_cast<int>(kBuckets));
}

TEST("other numbers of buckets divide the same line") {
  std::mt19937_64 random(4);
  for (int i = 0; i < 5000; ++i) {
    const auto id = static_cast<std::int64_t>(random());
    REQUIRE(bucket_of(id, 1) == 0);
    REQUIRE(bucket_of(id, 64) == bucket_of(id) / 64);
    REQUIRE(bucket_of(id, 8192) / 2 == bucket_of(id));
  }
}

TEST("ranges that are none are refused") {
  monolith::check_buckets({0, 4096});
  monolith::check_buckets({5, 5});
  CHECK_THROWS(monolith::check_buckets({0, 4097}), monolith::InvalidArgument);
  CHECK_THROWS(monolith::check_buckets({7, 6}), monolith::InvalidArgument);
}
