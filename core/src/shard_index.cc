#include "shard_index.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace monolith {
namespace {

constexpr std::uint32_t kSmallestLog2 = 2;

std::size_t block_bytes(std::uint32_t log2_buckets) { return sizeof(Bucket) << log2_buckets; }

std::uint64_t slots_of(std::uint32_t log2_buckets) { return std::uint64_t{Bucket::kSlots} << log2_buckets; }

// Three quarters: beyond that many ids are away from their first bucket.
std::uint64_t limit_of(std::uint32_t log2_buckets) { return slots_of(log2_buckets) / 4 * 3; }

Bucket* allocate_empty(BlockPool& pool, std::uint32_t log2_buckets) {
  return static_cast<Bucket*>(std::memset(pool.allocate(log2_buckets), 0, block_bytes(log2_buckets)));
}

// What the index knows of an id.
struct Entry {
  std::int64_t id;
  std::uint32_t row;
  std::uint32_t time;
};

Entry entry_at(const Bucket& bucket, int slot) { return {bucket.ids[slot], bucket.rows[slot], bucket.times[slot]}; }

void put(Bucket& bucket, int slot, const Entry& entry) noexcept {
  bucket.ids[slot] = entry.id;
  bucket.rows[slot] = entry.row;
  bucket.times[slot] = entry.time;
}

// Puts an id into the first free slot of its probe sequence. There must be one.
void place(Bucket* buckets, std::uint64_t mask, std::uint64_t hash, const Entry& entry) noexcept {
  std::uint64_t i = hash & mask;
  while (buckets[i].full()) i = (i + 1) & mask;
  put(buckets[i], buckets[i].used(), entry);
}

// Fills the gap with the bucket's last occupied slot.
void remove_from_bucket(Bucket& bucket, int slot) noexcept {
  const int last = bucket.used() - 1;
  put(bucket, slot, entry_at(bucket, last));
  bucket.rows[last] = 0;
}

}  // namespace

Bucket* BlockPool::allocate(std::uint32_t log2_buckets) {
  const std::size_t bytes = block_bytes(log2_buckets);
  if (log2_buckets != kFullLog2) {
    void* const memory = ::operator new(bytes, std::align_val_t{alignof(Bucket)});
    heap_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    return static_cast<Bucket*>(memory);
  }
  const std::lock_guard guard(mutex_);
  if (free_ != nullptr) {
    void* const memory = free_;
    free_ = free_->next;
    return static_cast<Bucket*>(memory);
  }
  if (regions_.empty() || used_ + bytes > regions_.back().size()) add_region(bytes);
  regions_.back().commit(used_ + bytes);
  void* const memory = regions_.back().base() + used_;
  used_ += bytes;
  return static_cast<Bucket*>(memory);
}

void BlockPool::add_region(std::size_t bytes) {
  if (regions_.size() == regions_.capacity()) regions_.reserve(2 * regions_.size() + 1);
  // Each four times the one before, so that a small table takes few addresses.
  constexpr std::size_t kSmallest = std::size_t{4} << 20, kLargest = std::size_t{256} << 20;
  const std::size_t wanted = regions_.empty() ? kSmallest : std::min(4 * regions_.back().size(), kLargest);
  regions_.push_back(ReservedMemory::at_most(std::max(bytes, wanted), bytes));
  used_ = 0;
}

void BlockPool::free(Bucket* buckets, std::uint32_t log2_buckets) noexcept {
  if (log2_buckets == kFullLog2) {
    const std::lock_guard guard(mutex_);
    free_ = new (buckets) Free{free_};
  } else {
    heap_bytes_.fetch_sub(block_bytes(log2_buckets), std::memory_order_relaxed);
    ::operator delete(buckets, std::align_val_t{alignof(Bucket)});
  }
}

void BlockPool::reserve(std::size_t bytes) {
  const std::lock_guard guard(mutex_);
  add_region(bytes);
  regions_.back().commit(bytes);
}

void BlockPool::release() noexcept {
  const std::lock_guard guard(mutex_);
  regions_.clear();
  used_ = 0;
  free_ = nullptr;
}

std::size_t BlockPool::bytes() const {
  const std::lock_guard guard(mutex_);
  std::size_t bytes = heap_bytes_.load(std::memory_order_relaxed);
  for (const ReservedMemory& region : regions_) {
    bytes += ReservedMemory::bytes_for(&region == &regions_.back() ? used_ : region.size());
  }
  return bytes;
}

ShardIndex::ShardIndex(BlockPool& pool, ShardView& view, std::uint32_t shard)
    : pool_(&pool),
      view_(&view),
      // 8 to 15 first entries, all on one small block: shards with more entries split their blocks at smaller sizes.
      directory_(8 + shard * 8 / kShards),
      owners_(directory_.size()),
      counts_(1),
      stagger_(shard) {
  blocks_.reserve(1);
  blocks_.push_back({allocate_empty(pool, kSmallestLog2), kSmallestLog2, 0, directory_.size()});
  slots_ = slots_of(kSmallestLog2);
  publish(0);
}

ShardIndex::~ShardIndex() { free_all(); }

void ShardIndex::free_all() noexcept {
  for (const Block& block : blocks_) pool_->free(block.buckets, block.log2_buckets);
}

void ShardIndex::publish(std::uint32_t number) noexcept {
  const Block& block = blocks_[number];
  const std::uintptr_t entry = reinterpret_cast<std::uintptr_t>(block.buckets) | block.log2_buckets;
  for (std::uint64_t i = block.first; i < block.last; ++i) {
    directory_[i] = entry;
    owners_[i] = number;
  }
  const bool single = blocks_.size() == 1;
  view_->only = entry;
  view_->entries = single ? &view_->only : directory_.data();
  view_->size = single ? 1 : directory_.size();
}

void ShardIndex::insert(const Search& search, std::int64_t id, std::uint64_t hash, std::uint32_t row, std::uint32_t time) {
  std::uint64_t at = search.entry;
  Slot slot = search.slot;
  while (counts_[owners_[at]] >= limit_of(directory_[at] & ShardView::kLog2Mask)) [[unlikely]] {
    grow(owners_[at]);
    const Search again = this->search(id, hash);
    at = again.entry;
    slot = again.slot;
  }
  ++counts_[owners_[at]];
  count_one(1);
  put(*slot.bucket, static_cast<int>(slot.slot), {id, row, time});
}

bool ShardIndex::may_double_directory() const noexcept {
  // Ids chosen to share their leading hash bits could double the directory for ever; past this the block itself grows.
  return directory_.size() < 16 * blocks_.size() + 64;
}

void ShardIndex::double_directory() {
  std::vector<std::uintptr_t> entries(2 * directory_.size());
  std::vector<std::uint32_t> owners(entries.size());
  directory_ = std::move(entries);
  owners_ = std::move(owners);
  for (std::uint32_t i = 0; i < blocks_.size(); ++i) {
    blocks_[i].first *= 2;
    blocks_[i].last *= 2;
    publish(i);
  }
}

void ShardIndex::grow(std::uint32_t number) {
  const auto single = [&] { return blocks_[number].last - blocks_[number].first == 1; };
  const bool large = blocks_[number].log2_buckets >= BlockPool::kFullLog2;
  if (large && single() && may_double_directory()) double_directory();
  large && !single() ? split(number) : double_block(number);
  growths_.fetch_add(1, std::memory_order_relaxed);
}

void ShardIndex::double_block(std::uint32_t number) {
  const Block old = blocks_[number];
  Block twice = old;
  twice.buckets = allocate_empty(*pool_, ++twice.log2_buckets);
  for (std::uint64_t i = 0; i <= old.mask(); ++i) {
    const Bucket& bucket = old.buckets[i];
    for (int slot = 0, used = bucket.used(); slot < used; ++slot) {
      place(twice.buckets, twice.mask(), hash_id(bucket.ids[slot]), entry_at(bucket, slot));
    }
  }
  blocks_[number] = twice;
  publish(number);
  slots_.fetch_add(slots_of(old.log2_buckets), std::memory_order_relaxed);
  pool_->free(old.buckets, old.log2_buckets);
}

// Both halves have as many buckets as the whole had. So an id in its first bucket stays in the bucket of the same number, here or
// there: one pass over the buckets writes both halves, each line once. Only the other ids must be placed anew.
void ShardIndex::split(std::uint32_t number) {
  std::vector<Entry> displaced;
  displaced.reserve(counts_[number]);
  if (blocks_.size() == blocks_.capacity()) blocks_.reserve(2 * blocks_.size());
  if (counts_.size() == counts_.capacity()) counts_.reserve(2 * counts_.size());
  Block right = blocks_[number];
  right.buckets = pool_->allocate(right.log2_buckets);
  Block& left = blocks_[number];
  // The first ones unevenly, in each shard differently: blocks of one size would all be full at the same time.
  const std::uint64_t entries = left.last - left.first;
  right.first = left.last = left.first + entries / 2 + stagger_ % (entries / 6 + 1);

  const std::uint64_t mask = left.mask();
  const auto goes_right = [&](std::uint64_t hash) { return entry_of(position_of(hash)) >= right.first; };
  std::uint32_t counts[2] = {0, 0};
  for (std::uint64_t i = 0; i <= mask; ++i) {
    const Bucket whole = left.buckets[i];
    Bucket* const halves[2] = {&left.buckets[i], &right.buckets[i]};
    for (Bucket* const half : halves) std::memset(half->rows, 0, sizeof(half->rows));
    std::uint32_t used[2] = {0, 0};
    for (int slot = 0, all = whole.used(); slot < all; ++slot) {
      const std::uint64_t hash = hash_id(whole.ids[slot]);
      if ((hash & mask) != i) {
        displaced.push_back(entry_at(whole, slot));
        continue;
      }
      const bool side = goes_right(hash);
      put(*halves[side], static_cast<int>(used[side]++), entry_at(whole, slot));
    }
    counts[0] += used[0];
    counts[1] += used[1];
  }
  for (const Entry& entry : displaced) {
    const std::uint64_t hash = hash_id(entry.id);
    const bool side = goes_right(hash);
    place(side ? right.buckets : left.buckets, mask, hash, entry);
    ++counts[side];
  }
  counts_[number] = counts[0];
  counts_.push_back(counts[1]);
  blocks_.push_back(right);
  publish(static_cast<std::uint32_t>(blocks_.size() - 1));
  slots_.fetch_add(slots_of(right.log2_buckets), std::memory_order_relaxed);
}

void ShardIndex::erase(Slot erased, std::uint64_t hash) noexcept {
  const std::uint32_t number = owners_[entry_of(position_of(hash))];
  Bucket* const buckets = blocks_[number].buckets;
  const std::uint64_t mask = blocks_[number].mask();
  std::uint64_t hole = static_cast<std::uint64_t>(erased.bucket - buckets);
  bool passed = buckets[hole].full();
  remove_from_bucket(buckets[hole], erased.slot);
  --counts_[number];
  count_one(-1);
  // While the bucket was full, ids further on may have probed past it: move one of them back, and so on along the run.
  for (std::uint64_t i = hole; passed;) {
    i = (i + 1) & mask;
    passed = buckets[i].full();
    for (int slot = 0; slot < Bucket::kSlots && buckets[i].rows[slot] != 0; ++slot) {
      const std::uint64_t home = hash_id(buckets[i].ids[slot]) & mask;
      if (((i - home) & mask) < ((i - hole) & mask)) continue;
      put(buckets[hole], Bucket::kSlots - 1, entry_at(buckets[i], slot));
      remove_from_bucket(buckets[i], slot);
      hole = i;
      break;
    }
  }
}

void ShardIndex::clear() {
  Bucket* const fresh = allocate_empty(*pool_, kSmallestLog2);
  free_all();
  blocks_.assign(1, {fresh, kSmallestLog2, 0, directory_.size()});
  counts_.assign(1, 0);
  publish(0);
  size_ = 0;
  slots_ = slots_of(kSmallestLog2);
}

}  // namespace monolith
