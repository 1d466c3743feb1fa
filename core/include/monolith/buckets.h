// Buckets: the ids of a model in 4096 parts of about equal size, by their hash. Owners, files and restores are arranged by bucket, so
// the number of processes may change between a save and a restore. Which bucket an id is in may never change.
#pragma once

#include <cstdint>

#include "monolith/hash.h"

namespace monolith {

inline constexpr std::uint32_t kBuckets = 4096;

// The bucket of an id among `count` > 0.
constexpr std::uint64_t bucket_of(std::int64_t id, std::uint64_t count = kBuckets) noexcept {
  return fast_range(hash_id(id), count);
}

// Buckets [first, last) of kBuckets; all of them by default. Buckets are ranges of hashes, and so are ranges of buckets.
struct BucketRange {
  std::uint32_t first = 0;
  std::uint32_t last = kBuckets;

  constexpr bool all() const noexcept { return first == 0 && last == kBuckets; }
  constexpr bool contains(std::int64_t id) const noexcept {
    const std::uint64_t bucket = bucket_of(id);
    return first <= bucket && bucket < last;
  }
  // The smallest hash of a bucket.
  static constexpr std::uint64_t first_hash(std::uint32_t bucket) noexcept { return std::uint64_t{bucket} << 52; }
};
static_assert(kBuckets == 1u << (64 - 52));

}  // namespace monolith
