#include "shard_index.h"

#include <cstring>
#include <new>

namespace monolith {
namespace {

constexpr std::uint32_t kSmallestLog2 = 2;

std::size_t block_bytes(std::uint32_t log2_buckets) { return sizeof(Block) + (sizeof(Bucket) << log2_buckets); }

std::uint64_t block_slots(const Block& block) { return std::uint64_t{Bucket::kSlots} << block.log2_buckets; }

// Seven eighths: beyond that linear probing over buckets of four gets long.
std::uint64_t block_limit(const Block& block) { return block_slots(block) / 4 * 3; }

// Puts an id into the first free slot of its probe sequence. The block must have room.
void place(Block& block, std::int64_t id, std::uint64_t hash, std::uint32_t row, std::uint32_t time) noexcept {
  Bucket* const buckets = block.buckets();
  const std::uint64_t mask = block.mask();
  std::uint64_t i = hash & mask;
  while (buckets[i].full()) i = (i + 1) & mask;
  Bucket& bucket = buckets[i];
  int slot = 0;
  while (bucket.rows[slot] != 0) ++slot;
  bucket.ids[slot] = id;
  bucket.rows[slot] = row;
  bucket.times[slot] = time;
  ++block.count;
}

// Fills the gap with the bucket's last occupied slot.
void remove_from_bucket(Bucket& bucket, int slot) noexcept {
  int last = Bucket::kSlots - 1;
  while (bucket.rows[last] == 0) --last;
  bucket.ids[slot] = bucket.ids[last];
  bucket.rows[slot] = bucket.rows[last];
  bucket.times[slot] = bucket.times[last];
  bucket.rows[last] = 0;
}

}  // namespace

Block* BlockPool::allocate(std::uint32_t log2_buckets) {
  const std::size_t bytes = block_bytes(log2_buckets);
  void* memory = nullptr;
  if (log2_buckets == kFullLog2) {
    {
      const std::lock_guard guard(mutex_);
      if (free_ != nullptr) {
        memory = free_;
        free_ = free_->next_free;
      }
    }
    if (memory == nullptr) memory = arena_->allocate(bytes);
  } else {
    memory = ::operator new(bytes, std::align_val_t{alignof(Block)});
    heap_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  std::memset(memory, 0, bytes);
  auto* block = new (memory) Block;
  block->log2_buckets = log2_buckets;
  return block;
}

void BlockPool::free(Block* block) noexcept {
  if (block->log2_buckets == kFullLog2) {
    const std::lock_guard guard(mutex_);
    block->next_free = free_;
    free_ = block;
  } else {
    heap_bytes_.fetch_sub(block_bytes(block->log2_buckets), std::memory_order_relaxed);
    ::operator delete(block, std::align_val_t{alignof(Block)});
  }
}

void BlockPool::forget() noexcept {
  const std::lock_guard guard(mutex_);
  free_ = nullptr;
}

ShardIndex::ShardIndex(BlockPool& pool, ShardView& view, std::uint32_t shard) : pool_(&pool), view_(&view) {
  // 8 to 15 first entries, all on one small block: shards with more entries split their blocks at smaller sizes.
  std::vector<std::uintptr_t> first(8 + shard * 8 / kShards);
  Block* block = pool_->allocate(kSmallestLog2);
  block->last = first.size();
  set_directory(std::move(first));
  blocks_ = 1;
  slots_ = block_slots(*block);
  publish(block);
}

ShardIndex::~ShardIndex() {
  for_each_block([&](Block* block) { pool_->free(block); });
}

template <typename F>
void ShardIndex::for_each_block(F&& f) const {
  for (std::uint64_t i = 0; i < directory_.size();) {
    Block* const block = block_of(directory_[i]);
    i = block->last;
    f(block);
  }
}

void ShardIndex::set_directory(std::vector<std::uintptr_t> entries) noexcept {
  directory_ = std::move(entries);
  view_->entries = directory_.data();
  view_->size = directory_.size();
}

void ShardIndex::publish(Block* block) noexcept {
  const std::uintptr_t entry = reinterpret_cast<std::uintptr_t>(block->buckets()) | block->log2_buckets;
  for (std::uint64_t i = block->first; i < block->last; ++i) directory_[i] = entry;
}

void ShardIndex::insert(std::int64_t id, std::uint64_t hash, std::uint32_t row, std::uint32_t time) {
  Block* block = block_of(view_->entry(hash));
  while (block->count >= block_limit(*block)) {
    grow(block);
    block = block_of(view_->entry(hash));
  }
  size_.fetch_add(1, std::memory_order_relaxed);
  place(*block, id, hash, row, time);
}

bool ShardIndex::may_double_directory() const noexcept {
  // Ids chosen to share their leading hash bits could double the directory for ever; past this the block itself grows.
  return directory_.size() < 16 * blocks_ + 64;
}

void ShardIndex::double_directory() {
  std::vector<std::uintptr_t> next(2 * directory_.size());
  for_each_block([&](Block* block) {
    const std::uintptr_t entry = directory_[block->first];
    block->first *= 2;
    block->last *= 2;
    for (std::uint64_t i = block->first; i < block->last; ++i) next[i] = entry;
  });
  set_directory(std::move(next));
}

void ShardIndex::grow(Block* block) {
  const bool split = block->log2_buckets >= BlockPool::kFullLog2 &&
                     (block->last - block->first > 1 || may_double_directory());
  if (split && block->last - block->first == 1) double_directory();
  Block* const left = pool_->allocate(split ? block->log2_buckets : block->log2_buckets + 1);
  Block* right = left;
  left->first = block->first;
  left->last = block->last;
  if (split) {
    try {
      right = pool_->allocate(block->log2_buckets);
    } catch (...) {
      pool_->free(left);
      throw;
    }
    right->last = left->last;
    right->first = left->last = block->first + (block->last - block->first) / 2;
  }
  for (std::uint64_t i = 0; i <= block->mask(); ++i) {
    const Bucket& bucket = block->buckets()[i];
    for (int slot = 0; slot < Bucket::kSlots && bucket.rows[slot] != 0; ++slot) {
      const std::uint64_t hash = hash_id(bucket.ids[slot]);
      Block& target = fast_range(position_of(hash), directory_.size()) < left->last ? *left : *right;
      place(target, bucket.ids[slot], hash, bucket.rows[slot], bucket.times[slot]);
    }
  }
  publish(left);
  if (split) publish(right);
  blocks_ += split;
  slots_.fetch_add(block_slots(*left) + (split ? block_slots(*right) : 0) - block_slots(*block), std::memory_order_relaxed);
  growths_.fetch_add(1, std::memory_order_relaxed);
  pool_->free(block);
}

void ShardIndex::erase(Slot erased, std::uint64_t hash) noexcept {
  Block& block = *block_of(view_->entry(hash));
  Bucket* const buckets = block.buckets();
  const std::uint64_t mask = block.mask();
  std::uint64_t hole = static_cast<std::uint64_t>(erased.bucket - buckets);
  bool passed = buckets[hole].full();
  remove_from_bucket(buckets[hole], erased.slot);
  --block.count;
  size_.fetch_sub(1, std::memory_order_relaxed);
  // While the bucket was full, ids further on may have probed past it: move one of them back, and so on along the run.
  for (std::uint64_t i = hole; passed;) {
    i = (i + 1) & mask;
    passed = buckets[i].full();
    for (int slot = 0; slot < Bucket::kSlots && buckets[i].rows[slot] != 0; ++slot) {
      const std::uint64_t home = hash_id(buckets[i].ids[slot]) & mask;
      if (((i - home) & mask) < ((i - hole) & mask)) continue;
      Bucket& target = buckets[hole];
      const int free = Bucket::kSlots - 1;
      target.ids[free] = buckets[i].ids[slot];
      target.rows[free] = buckets[i].rows[slot];
      target.times[free] = buckets[i].times[slot];
      remove_from_bucket(buckets[i], slot);
      hole = i;
      break;
    }
  }
}

void ShardIndex::clear() {
  Block* const fresh = pool_->allocate(kSmallestLog2);
  for_each_block([&](Block* block) { pool_->free(block); });
  fresh->last = directory_.size();
  publish(fresh);
  blocks_ = 1;
  size_ = 0;
  slots_ = block_slots(*fresh);
}

}  // namespace monolith
