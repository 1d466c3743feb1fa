// What finding the number of a row takes, as plain data: the index of each shard. The kernels read it, so it has no function of the
// standard library in it, and every function here must be inlined (CMakeLists.txt says why).
#pragma once

#include <cstddef>
#include <cstdint>

#include "bucket.h"
#include "monolith/hash.h"

namespace monolith {

inline constexpr int kShardBits = 7;
inline constexpr std::uint32_t kShards = 1u << kShardBits;
static_assert(kShards <= 256, "a byte for the number of a shard, where there are many");

[[gnu::always_inline]] inline std::uint32_t shard_of(std::uint64_t hash) noexcept {
  return static_cast<std::uint32_t>(hash >> (64 - kShardBits));
}
// Where a hash lies inside its shard, as a 64-bit fraction.
[[gnu::always_inline]] inline std::uint64_t position_of(std::uint64_t hash) noexcept { return hash << kShardBits; }

// One shard. A directory entry is the address of a block's first bucket (64-byte aligned) with log2 of its bucket count in the
// low bits; the buckets of a block are probed linearly from the low bits of the hash.
struct ShardView {
  static constexpr std::uintptr_t kLog2Mask = 63;

  const std::uintptr_t* entries = nullptr;
  std::uint64_t size = 0;  // entries
  std::uintptr_t only = 0;  // the single entry of a shard with one block; here, and not in a directory elsewhere in memory, because
                            // a batch for many small tables meets every shard's directory in no cache

  // Where the directory entry of a hash is.
  [[gnu::always_inline]] const std::uintptr_t* place(std::uint64_t hash) const noexcept {
    return entries + fast_range(position_of(hash), size);
  }
  [[gnu::always_inline]] std::uintptr_t entry(std::uint64_t hash) const noexcept { return *place(hash); }
  [[gnu::always_inline]] static std::uint64_t mask(std::uintptr_t entry) noexcept {
    return (std::uint64_t{1} << (entry & kLog2Mask)) - 1;
  }
  [[gnu::always_inline]] static Bucket* buckets(std::uintptr_t entry) noexcept {
    return reinterpret_cast<Bucket*>(entry & ~kLog2Mask);
  }
  // The bucket an id's probe sequence starts with: nine ids of ten are there.
  [[gnu::always_inline]] Bucket* home(std::uint64_t hash) const noexcept { return bucket(entry(hash), hash); }
  [[gnu::always_inline]] static Bucket* bucket(std::uintptr_t entry, std::uint64_t hash) noexcept {
    return buckets(entry) + (hash & mask(entry));
  }
  [[gnu::always_inline]] Search search(std::int64_t id, std::uint64_t hash) const noexcept {
    const std::uint64_t at = fast_range(position_of(hash), size);
    Bucket* const first = buckets(entries[at]);
    const std::uint64_t last = mask(entries[at]);
    for (std::uint64_t i = hash & last;; i = (i + 1) & last) {
      const Bucket::Match match = first[i].match(id);
      if (match.row != 0) return {{&first[i], match.slot}, true, at};
      if (!first[i].full()) return {{&first[i], static_cast<std::uint32_t>(first[i].used())}, false, at};
    }
  }
  [[gnu::always_inline]] BucketSlot find(std::int64_t id, std::uint64_t hash) const noexcept {
    const Search result = search(id, hash);
    return result.found ? result.slot : BucketSlot{};
  }
};

}  // namespace monolith
