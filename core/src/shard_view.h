// What finding a row takes, as plain data: the index of each shard and where its rows lie. The kernels read it, so it has no
// function of the standard library in it, and every function here must be inlined (CMakeLists.txt says why).
#pragma once

#include <cstddef>
#include <cstdint>

#include "bucket.h"
#include "monolith/hash.h"

namespace monolith {

inline constexpr int kShardBits = 7;
inline constexpr std::uint32_t kShards = 1u << kShardBits;

[[gnu::always_inline]] inline std::uint32_t shard_of(std::uint64_t hash) noexcept {
  return static_cast<std::uint32_t>(hash >> (64 - kShardBits));
}
// Where a hash lies inside its shard, as a 64-bit fraction.
[[gnu::always_inline]] inline std::uint64_t position_of(std::uint64_t hash) noexcept { return hash << kShardBits; }

// The chunk a row is in. Sixty-four chunks per doubling: the chunk number is the exponent and the top six mantissa bits of the row
// number, so a chunk is at most a sixty-fourth of what is there: little memory waits unused, and shards that start their chunks at
// the same time ask the system for little at once.
struct RowChunk {
  static constexpr int kMantissaBits = 6;
  static constexpr std::uint64_t kChunksPerDoubling = std::uint64_t{1} << kMantissaBits;
  static constexpr int kFirstExponent = 8;
  static constexpr std::uint64_t kBias = std::uint64_t{1} << kFirstExponent;  // the first chunks hold 256 / 64 rows

  std::uint64_t number;
  int log2_rows;

  [[gnu::always_inline]] static RowChunk of(std::uint64_t biased) noexcept {
    const int shift = 63 - kMantissaBits - __builtin_clzll(biased);
    const std::uint64_t mantissa = biased >> shift;  // 64..127
    constexpr std::uint64_t kFirst = (kFirstExponent - kMantissaBits + 1) * kChunksPerDoubling;
    return {static_cast<std::uint64_t>(shift) * kChunksPerDoubling + mantissa - kFirst, shift};
  }
};

// One shard. A directory entry is the address of a block's first bucket (64-byte aligned) with log2 of its bucket count in the
// low bits; the buckets of a block are probed linearly from the low bits of the hash.
struct ShardView {
  static constexpr std::uintptr_t kLog2Mask = 63;

  const std::uintptr_t* entries = nullptr;
  std::uint64_t size = 0;  // entries
  // By chunk: where row number -kBias would be if all rows lay as those of the chunk do. A row's address is then one multiplication.
  const std::uintptr_t* chunks = nullptr;

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
  [[gnu::always_inline]] BucketSlot find(std::int64_t id, std::uint64_t hash) const noexcept {
    const std::uintptr_t found = entry(hash);
    Bucket* const first = buckets(found);
    for (std::uint64_t i = hash & mask(found);; i = (i + 1) & mask(found)) {
      const Bucket::Match match = first[i].match(id);
      if (match.row != 0) return {&first[i], match.slot};
      if (!first[i].full()) return {};
    }
  }
  [[gnu::always_inline]] std::byte* row(std::uint32_t number, std::uint32_t row_bytes) const noexcept {
    const std::uint64_t biased = number + RowChunk::kBias;
    return reinterpret_cast<std::byte*>(chunks[RowChunk::of(biased).number] + biased * row_bytes);
  }
};

}  // namespace monolith
