// id -> (row number, last-update time) for the ids of one shard. Extendible hashing: a directory over the shard's hash range
// points at blocks of buckets; a full block is doubled while small and then split in two, so growth always costs one block
// and never the whole table. The ids of a block are a contiguous range of hashes, which lets a scan resume after any growth.
//
// Not thread-safe (the shard's lock guards it), except prefetch(), which may run beside anything.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "arena.h"
#include "bucket.h"
#include "kernels/kernels.h"
#include "monolith/hash.h"

namespace monolith {

inline constexpr int kShardBits = 7;
inline constexpr std::uint32_t kShards = 1u << kShardBits;

inline std::uint32_t shard_of(std::uint64_t hash) noexcept { return static_cast<std::uint32_t>(hash >> (64 - kShardBits)); }
// Where a hash lies inside its shard, as a 64-bit fraction.
inline std::uint64_t position_of(std::uint64_t hash) noexcept { return hash << kShardBits; }

// A header followed by 2^log2_buckets buckets, probed linearly from the low bits of the hash.
struct alignas(64) Block {
  std::uint32_t count = 0;
  std::uint32_t log2_buckets = 0;
  std::uint64_t first = 0;  // directory entries [first, last) point here
  std::uint64_t last = 0;
  Block* next_free = nullptr;

  Bucket* buckets() noexcept { return reinterpret_cast<Bucket*>(this + 1); }
  const Bucket* buckets() const noexcept { return reinterpret_cast<const Bucket*>(this + 1); }
  std::uint64_t mask() const noexcept { return (std::uint64_t{1} << log2_buckets) - 1; }
};
static_assert(sizeof(Block) == 64);

// Hands out zeroed blocks. Full-size ones come from the arena and are reused; others from the heap. Thread-safe.
class BlockPool {
 public:
  // 512 buckets, 32 KiB: small enough to be rehashed in microseconds, large enough to keep the directory in cache.
  static constexpr std::uint32_t kFullLog2 = 9;

  explicit BlockPool(Arena& arena) : arena_(&arena) {}
  Block* allocate(std::uint32_t log2_buckets);
  void free(Block* block) noexcept;
  void forget() noexcept;  // the arena is about to be released
  std::size_t heap_bytes() const noexcept { return heap_bytes_.load(std::memory_order_relaxed); }

 private:
  Arena* arena_;
  std::mutex mutex_;
  Block* free_ = nullptr;
  std::atomic<std::size_t> heap_bytes_{0};
};

class ShardIndex {
 public:
  // A found or inserted id. Valid until the next insert or erase.
  struct Slot {
    Bucket* bucket = nullptr;
    int slot = 0;
    explicit operator bool() const noexcept { return bucket != nullptr; }
    std::uint32_t& row() const noexcept { return bucket->rows[slot]; }
    std::uint32_t& time() const noexcept { return bucket->times[slot]; }
  };

  // `shard` only staggers the moments at which the shards grow, so that the memory of a table rises smoothly.
  ShardIndex(BlockPool& pool, std::uint32_t shard);
  ~ShardIndex();
  ShardIndex(const ShardIndex&) = delete;
  ShardIndex& operator=(const ShardIndex&) = delete;

  void prefetch(std::uint64_t hash) const noexcept {
    const Directory& directory = *directory_.load(std::memory_order_acquire);
    __builtin_prefetch(reinterpret_cast<const void*>(home_bucket(directory.entry(position_of(hash)), hash)));
  }

  // find() for at most kMostAtOnce ids. Calls behind(slot) once per id as soon as its bucket has been seen, for the caller to
  // fetch the row. The slot given to behind() is sometimes only a guess, but always one with a valid row number.
  //
  // In passes, so that the memory accesses of one pass overlap: locate and fetch the first buckets, compare, look at the rest.
  // Whether an id is in its first bucket cannot be predicted, and a wrongly predicted branch throws away all the accesses under
  // way behind it; so first buckets are compared without branches and the rest is looked at afterwards.
  template <typename Behind>
  void find(std::span<const std::int64_t> ids, Slot* slots, Behind&& behind) const noexcept {
    const Directory& directory = this->directory();
    std::array<const Bucket*, kMostAtOnce> buckets;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::uint64_t hash = hash_id(ids[i]);
      buckets[i] = reinterpret_cast<const Bucket*>(home_bucket(directory.entry(position_of(hash)), hash));
      __builtin_prefetch(buckets[i]);
    }
    std::array<std::uint8_t, kMostAtOnce> matched;
    std::array<std::uint16_t, kMostAtOnce> rest;
    const std::size_t resting = kernels_->match(buckets.data(), ids.data(), ids.size(), matched.data(), rest.data());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      slots[i] = {const_cast<Bucket*>(buckets[i]), matched[i]};
      behind(slots[i]);
    }
    for (std::size_t i = 0; i < resting; ++i) __builtin_prefetch(slots[rest[i]].bucket + 1);
    for (std::size_t i = 0; i < resting; ++i) {
      Slot& slot = slots[rest[i]];
      slot = find(ids[rest[i]], hash_id(ids[rest[i]]));
      if (slot) behind(slot);
    }
  }
  static constexpr std::size_t kMostAtOnce = 128;

  Slot find(std::int64_t id, std::uint64_t hash) const noexcept {
    const std::uintptr_t entry = directory().entry(position_of(hash));
    Bucket* const buckets = buckets_of(entry);
    const std::uint64_t mask = (std::uint64_t{1} << (entry & kLog2Mask)) - 1;
    for (std::uint64_t i = hash & mask;; i = (i + 1) & mask) {
      const int slot = buckets[i].match(id);
      if (slot >= 0) return {&buckets[i], slot};
      if (!buckets[i].full()) return {};
    }
  }

  // Adds an id that is not there. Throws std::bad_alloc, leaving the index as it was.
  Slot insert(std::int64_t id, std::uint64_t hash, std::uint32_t row, std::uint32_t time);

  void erase(Slot slot, std::uint64_t hash) noexcept;

  // Calls f(id, hash, Slot) for every id of the block that holds `position`, skipping those before it; returns the position
  // after that block, or 0 when it was the last. Ids present throughout a scan are visited exactly once.
  template <typename F>
  std::uint64_t scan_block(std::uint64_t position, F&& f) const;

  // Forgets all ids and gives blocks back. The directory keeps its size: prefetch() may be reading it.
  void clear();

  std::uint64_t size() const noexcept { return size_.load(std::memory_order_relaxed); }
  std::uint64_t slots() const noexcept { return slots_.load(std::memory_order_relaxed); }
  std::uint64_t growths() const noexcept { return growths_.load(std::memory_order_relaxed); }
  std::size_t directory_bytes() const noexcept { return directory_bytes_.load(std::memory_order_relaxed); }

 private:
  // An entry is the address of a block's first bucket (64-byte aligned) with log2 of its bucket count in the low bits.
  static constexpr std::uintptr_t kLog2Mask = 63;
  struct Directory {
    explicit Directory(std::uint64_t n) : size(n), entries(new std::atomic<std::uintptr_t>[n]) {}
    std::uint64_t size;
    std::unique_ptr<std::atomic<std::uintptr_t>[]> entries;
    std::uintptr_t entry(std::uint64_t position) const noexcept {
      return entries[fast_range(position, size)].load(std::memory_order_relaxed);
    }
  };

  static Bucket* buckets_of(std::uintptr_t entry) noexcept { return reinterpret_cast<Bucket*>(entry & ~kLog2Mask); }
  static Block* block_of(std::uintptr_t entry) noexcept { return reinterpret_cast<Block*>(entry & ~kLog2Mask) - 1; }
  static std::uintptr_t home_bucket(std::uintptr_t entry, std::uint64_t hash) noexcept {
    const std::uint64_t mask = (std::uint64_t{1} << (entry & kLog2Mask)) - 1;
    return (entry & ~kLog2Mask) + (hash & mask) * sizeof(Bucket);
  }
  Directory& directory() const noexcept { return *directory_.load(std::memory_order_relaxed); }
  void publish(Block* block) noexcept;
  void grow(Block* block);
  bool may_double_directory() const noexcept;
  void double_directory();

  BlockPool* pool_;
  const Kernels* kernels_ = &kernels();
  std::atomic<Directory*> directory_;
  // Outgrown directories stay until the end: a prefetch may still read one. Together they are no larger than the current.
  std::vector<std::unique_ptr<Directory>> directories_;
  std::uint64_t blocks_ = 0;
  std::atomic<std::uint64_t> size_{0};
  std::atomic<std::uint64_t> slots_{0};
  std::atomic<std::uint64_t> growths_{0};
  std::atomic<std::size_t> directory_bytes_{0};
};

template <typename F>
std::uint64_t ShardIndex::scan_block(std::uint64_t position, F&& f) const {
  const Directory& directory = this->directory();
  Block* const block = block_of(directory.entry(position));
  for (std::uint64_t i = 0; i <= block->mask(); ++i) {
    Bucket& bucket = block->buckets()[i];
    for (int slot = 0; slot < Bucket::kSlots && bucket.rows[slot] != 0; ++slot) {
      const std::uint64_t hash = hash_id(bucket.ids[slot]);
      if (position_of(hash) >= position) f(bucket.ids[slot], hash, Slot{&bucket, slot});
    }
  }
  if (block->last == directory.size) return 0;
  // The smallest position that fast_range maps to `last`: ceil(last * 2^64 / size).
  const auto scaled = (static_cast<unsigned __int128>(block->last) << 64) + directory.size - 1;
  return static_cast<std::uint64_t>(scaled / directory.size);
}

}  // namespace monolith
