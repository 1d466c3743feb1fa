// id -> (row number, last-update time) for the ids of one shard. Extendible hashing: a directory over the shard's hash range
// points at blocks of buckets; a full block is doubled while small and then split in two, so growth always costs one block
// and never the whole table. The ids of a block are a contiguous range of hashes, which lets a scan resume after any growth.
//
// Not thread-safe: the shard's lock guards it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "bucket.h"
#include "monolith/hash.h"
#include "reserved_memory.h"
#include "shard_view.h"

namespace monolith {

// 2^log2_buckets buckets, probed linearly from the low bits of the hash. What is known about them is not beside them: every
// insert would then wait for one more page of the table.
struct Block {
  Bucket* buckets;
  std::uint32_t log2_buckets;
  std::uint64_t first;  // directory entries [first, last) point here
  std::uint64_t last;

  std::uint64_t mask() const noexcept { return (std::uint64_t{1} << log2_buckets) - 1; }
};

// Hands out memory for buckets. Blocks of full size lie on huge pages (a table is all random access) and are used again; smaller ones
// are of the heap. Thread-safe.
class BlockPool {
 public:
  // 512 buckets, 32 KiB: small enough to be rehashed in microseconds, large enough to keep the directory in cache.
  static constexpr std::uint32_t kFullLog2 = 9;

  BlockPool() = default;
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  // Uninitialised. Throws std::bad_alloc.
  Bucket* allocate(std::uint32_t log2_buckets);
  void free(Bucket* buckets, std::uint32_t log2_buckets) noexcept;
  // Asks the system now for this much memory for blocks of full size. Throws std::bad_alloc.
  void reserve(std::size_t bytes);
  // Gives the memory of all blocks of full size back.
  void release() noexcept;
  // Memory that is taken.
  std::size_t bytes() const;

 private:
  struct Free {
    Free* next;
  };
  void add_region(std::size_t bytes);

  mutable std::mutex mutex_;
  std::vector<ReservedMemory> regions_;  // the last one has room; where blocks lie does not matter to anybody
  std::size_t used_ = 0;                 // bytes of the last region
  Free* free_ = nullptr;
  std::atomic<std::size_t> heap_bytes_{0};
};

class ShardIndex {
 public:
  using Slot = BucketSlot;

  // `shard` only staggers the moments at which blocks grow, so that the memory of a table rises smoothly.
  // Keeps the view true.
  ShardIndex(BlockPool& pool, ShardView& view, std::uint32_t shard);
  ~ShardIndex();
  ShardIndex(const ShardIndex&) = delete;
  ShardIndex& operator=(const ShardIndex&) = delete;

  Slot find(std::int64_t id, std::uint64_t hash) const noexcept { return view_->find(id, hash); }

  // Where find() will look first.
  const Bucket* home(std::uint64_t hash) const noexcept { return view_->home(hash); }

  Search search(std::int64_t id, std::uint64_t hash) const noexcept { return view_->search(id, hash); }

  // Adds an id that was searched for and not found. Throws std::bad_alloc, leaving the index as it was.
  void insert(const Search& search, std::int64_t id, std::uint64_t hash, std::uint32_t row, std::uint32_t time);

  void erase(Slot slot, std::uint64_t hash) noexcept;

  // Calls f(id, hash, Slot) for every id of the block that holds `position`, skipping those before it; returns the position
  // after that block, or 0 when it was the last. Ids present throughout a scan are visited exactly once.
  template <typename F>
  std::uint64_t scan_block(std::uint64_t position, F&& f) const;

  // Calls f(id, hash, Slot) for every id.
  template <typename F>
  void for_each(F&& f) const {
    std::uint64_t position = 0;
    do position = scan_block(position, f);
    while (position != 0);
  }

  // Forgets all ids and gives blocks back. The directory keeps its size.
  void clear();

  std::uint64_t size() const noexcept { return size_.load(std::memory_order_relaxed); }
  std::uint64_t slots() const noexcept { return slots_.load(std::memory_order_relaxed); }
  std::uint64_t growths() const noexcept { return growths_.load(std::memory_order_relaxed); }
  // Directory and blocks, without the buckets.
  std::size_t directory_bytes() const noexcept {
    return directory_.size() * (sizeof(std::uintptr_t) + sizeof(std::uint32_t)) +
           blocks_.capacity() * (sizeof(Block) + sizeof(std::uint32_t));
  }

 private:
  std::uint64_t entry_of(std::uint64_t position) const noexcept { return fast_range(position, directory_.size()); }
  // Only the holder of the lock counts, so this need not be one atomic step, which would wait for every store under way: those
  // of a new row are on their way to memory.
  void count_one(int change) noexcept {
    size_.store(size_.load(std::memory_order_relaxed) + static_cast<std::uint64_t>(change), std::memory_order_relaxed);
  }
  void free_all() noexcept;
  void publish(std::uint32_t block) noexcept;
  void grow(std::uint32_t block);
  void double_block(std::uint32_t block);
  void split(std::uint32_t block);
  bool may_double_directory() const noexcept;
  void double_directory();

  BlockPool* pool_;
  ShardView* view_;
  std::vector<std::uintptr_t> directory_;
  std::vector<std::uint32_t> owners_;  // by directory entry: the number of its block
  std::vector<std::uint32_t> counts_;  // ids of a block, by its number
  std::vector<Block> blocks_;          // by number, in no order
  std::uint32_t stagger_;              // the shard
  std::atomic<std::uint64_t> size_{0};
  std::atomic<std::uint64_t> slots_{0};
  std::atomic<std::uint64_t> growths_{0};
};

template <typename F>
std::uint64_t ShardIndex::scan_block(std::uint64_t position, F&& f) const {
  const Block& block = blocks_[owners_[entry_of(position)]];
  for (std::uint64_t i = 0; i <= block.mask(); ++i) {
    Bucket& bucket = block.buckets[i];
    for (int slot = 0; slot < Bucket::kSlots && bucket.rows[slot] != 0; ++slot) {
      const std::uint64_t hash = hash_id(bucket.ids[slot]);
      if (position_of(hash) >= position) f(bucket.ids[slot], hash, Slot{&bucket, static_cast<std::uint32_t>(slot)});
    }
  }
  if (block.last == directory_.size()) return 0;
  // The smallest position that fast_range maps to `last`: ceil(last * 2^64 / size).
  const auto scaled = (static_cast<unsigned __int128>(block.last) << 64) + directory_.size() - 1;
  return static_cast<std::uint64_t>(scaled / directory_.size());
}

}  // namespace monolith
