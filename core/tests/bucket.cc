// One cache line of the index. A match is found without branches, so nothing but tests would notice a slot that is compared
// wrongly: the id would simply get another row.
#include "bucket.h"

#include <cstdint>
#include <cstring>
#include <random>

#include "check.h"

namespace {

using monolith::Bucket;

Bucket empty() {
  Bucket bucket;
  std::memset(&bucket, 0, sizeof bucket);
  return bucket;
}

void put(Bucket& bucket, int slot, std::int64_t id, std::uint32_t row) {
  bucket.ids[slot] = id;
  bucket.rows[slot] = row;
  bucket.times[slot] = row * 10;
}

}  // namespace

TEST("a bucket is one cache line with four slots") {
  CHECK_EQ(sizeof(Bucket), 64u);
  CHECK_EQ(alignof(Bucket), 64u);
  CHECK_EQ(static_cast<int>(Bucket::kSlots), 4);
}

TEST("every slot is found") {
  Bucket bucket = empty();
  const std::int64_t ids[] = {5, -7, std::int64_t{1} << 62, INT64_MIN};
  for (int n = 0; n < 4; ++n) {
    CHECK_EQ(bucket.used(), n);
    CHECK(!bucket.full());
    put(bucket, n, ids[n], static_cast<std::uint32_t>(n + 1));
    for (int slot = 0; slot < 4; ++slot) {
      const auto match = bucket.match(ids[slot]);
      if (slot <= n) {
        CHECK_EQ(match.row, static_cast<std::uint32_t>(slot + 1));
        CHECK_EQ(match.slot, static_cast<std::uint32_t>(slot));
      } else {
        CHECK_EQ(match.row, 0u);
      }
    }
  }
  CHECK_EQ(bucket.used(), 4);
  CHECK(bucket.full());
}

TEST("ids that differ in one bit are different") {
  for (int bit = 0; bit < 64; ++bit) {
    Bucket bucket = empty();
    const std::int64_t id = 0x0123456789abcdef;
    put(bucket, 0, id, 1);
    const auto other = static_cast<std::int64_t>(static_cast<std::uint64_t>(id) ^ std::uint64_t{1} << bit);
    CHECK_EQ(bucket.match(other).row, 0u);
    put(bucket, 1, other, 2);
    CHECK_EQ(bucket.match(id).row, 1u);
    CHECK_EQ(bucket.match(other).row, 2u);
  }
}

TEST("the id 0 is not in an empty slot") {
  Bucket bucket = empty();
  CHECK_EQ(bucket.match(0).row, 0u);
  put(bucket, 0, 9, 3);
  CHECK_EQ(bucket.match(0).row, 0u);
  put(bucket, 1, 0, 4);
  CHECK_EQ(bucket.match(0).row, 4u);
  CHECK_EQ(bucket.match(0).slot, 1u);
}

TEST("what is left in a slot whose row is gone does not count") {
  Bucket bucket = empty();
  put(bucket, 0, 11, 1);
  put(bucket, 1, 12, 2);
  bucket.rows[1] = 0;  // as erase leaves it
  CHECK_EQ(bucket.used(), 1);
  CHECK_EQ(bucket.match(12).row, 0u);
  CHECK_EQ(bucket.match(11).row, 1u);
}

TEST("random buckets are searched as slot by slot") {
  std::mt19937_64 random(9);
  for (int round = 0; round < 5000; ++round) {
    Bucket bucket = empty();
    const int used = static_cast<int>(random() % 5);
    for (int slot = 0; slot < used; ++slot) {
      put(bucket, slot, static_cast<std::int64_t>(random() % 8) * 4 + slot, static_cast<std::uint32_t>(random() % 1000 + 1));
    }
    REQUIRE(bucket.used() == used);
    for (std::int64_t id = -1; id < 36; ++id) {
      std::uint32_t row = 0;
      for (int slot = 0; slot < used; ++slot) row = bucket.ids[slot] == id ? bucket.rows[slot] : row;
      REQUIRE(bucket.match(id).row == row);
    }
  }
}
