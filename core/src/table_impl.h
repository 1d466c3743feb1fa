// The inside of Table, shared by the files that implement it: table.cc (reads and bookkeeping), table_apply.cc (gradients),
// table_update.cc (other writes), table_changes.cc (what changed) and table_feed.cc (what followers get).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <span>
#include <vector>

#include "change_set.h"
#include "feed_set.h"
#include "fetch.h"
#include "kernels/kernels.h"
#include "layout.h"
#include "monolith/error.h"
#include "monolith/table.h"
#include "row_pool.h"
#include "rw_lock.h"
#include "shard_index.h"
#include "monolith/write_gate.h"

namespace monolith {

// Ids are handled in groups of at most this many under one acquisition of a shard's lock: long enough that the memory
// accesses of a group overlap, short enough that nobody waits long for the lock.
inline constexpr std::size_t kGroup = 128;

struct alignas(64) Shard {
  Shard(RwLock& guard, RowRegion& region, BlockPool& blocks, ShardView& view, std::uint32_t number)
      : lock(guard), index(blocks, view, number), rows(region) {}
  RwLock& lock;
  ShardIndex index;
  RowPool rows;
  std::unique_ptr<ChangeSet> changes;  // null without change tracking: in all shards or in none
  std::unique_ptr<FeedSet> feed;       // null without a feed, likewise
};

// A batch in shard order: ids of shard s are at [starts[s], starts[s + 1]), in their original order. A tag is the position of
// an id in the call, or the bag it belongs to.
struct Partition {
  std::vector<std::int64_t> ids;
  std::vector<std::uint32_t> tags;
  std::array<std::uint32_t, kShards + 1> starts;
  std::vector<std::uint8_t> call_shards;  // in call order

  // row_splits may be empty: then tags are positions, counted from 0.
  void build(std::span<const std::int64_t> call_ids, std::span<const std::int64_t> row_splits);

  std::span<const std::int64_t> group(std::size_t first, std::size_t last) const noexcept {
    return {ids.data() + first, last - first};
  }

  // The calling thread's own, kept between calls.
  static Partition& of_this_thread();
};

struct Table::Impl {
  Impl(TableConfig config, std::shared_ptr<AdmissionFilter> admission);

  TableConfig config;
  RowLayout layout;
  std::vector<SegmentPlan> plans;
  std::shared_ptr<AdmissionFilter> admission;
  const Kernels* kernels;
  std::uint64_t table_key;  // hash of seed and name: what initial values depend on besides the id
  bool needs_id_keys = false;  // some segment rounds stochastically

  RowRegion region{layout.row_bytes};
  BlockPool blocks;
  SavedRooms saved_rooms{layout.row_bytes};
  std::unique_ptr<ChangeBits> change_bits;  // null without change tracking
  std::unique_ptr<ChangeBits> feed_bits;    // null without a feed
  std::array<ShardView, kShards> views;
  // Of the shards, side by side: a small batch takes nearly all of them, and finds them in a few cache lines.
  std::array<RwLock, kShards> locks;
  std::vector<std::unique_ptr<Shard>> shards;
  mutable WriteGate gate;
  std::atomic<std::uint32_t> max_event_time{0};
  std::atomic<std::uint32_t> updates{0};  // gradient calls so far; part of the state: stochastic rounding must not repeat its draws
  mutable std::atomic<std::uint32_t> lookups_since_update{0};  // in pieces
  std::unique_ptr<std::atomic<float>[]> hashnet_scales;
  std::vector<std::uint64_t> slot_expiry;  // by fid v2 slot; empty when all are the default

  void reconfigure(const TableConfig& other, std::shared_ptr<AdmissionFilter> filter);

  // The cut that is under way, and how far it has been read: up to `position` in the list of `shard`.
  struct Cut {
    std::mutex mutex;
    std::uint64_t number = 0;
    bool open = false;
    bool failed = false;
    std::uint32_t shard = 0;
    std::size_t position = 0;
    std::size_t unread = 0;                // rows, at most
    std::vector<std::int64_t> came_back;  // ids of this shard that were removed and then inserted again before the cut
    void require(const TableConfig& config, std::uint64_t wanted) const;
  };
  Cut cut;

  // How far the feed has been read: up to `position` in what was taken from `shard`.
  struct Feed {
    std::mutex mutex;
    std::uint32_t shard = 0;
    bool reading = false;
    std::size_t position = 0;
    FeedSet::Taken taken;
  };
  Feed feed;

  std::uint64_t id_key(std::uint64_t hash) const noexcept { return hash_id(static_cast<std::int64_t>(hash ^ table_key)); }
  float hashnet_scale(std::size_t segment) const noexcept { return hashnet_scales[segment].load(std::memory_order_relaxed); }

  // Cache lines that the first `bytes` bytes of a row may touch, starting at any offset that row sizes lead to.
  std::uint32_t lines(std::uint32_t bytes) const noexcept {
    const std::uint32_t last_offset = 64 - std::gcd(layout.row_bytes, 64u);
    return (last_offset + bytes + 63) / 64;
  }

  void note_event_time(std::uint32_t time) noexcept {
    std::uint32_t known = max_event_time.load(std::memory_order_relaxed);
    while (known < time && !max_event_time.compare_exchange_weak(known, time, std::memory_order_relaxed)) {
    }
  }

  // The row of an id, created and initialised if it was not there.
  struct Upsert {
    std::byte* row;
    bool existed;
  };
  // The shard must be locked. `admit` decides about an id that is not there; row is null if it says no. With kInit false the
  // caller overwrites a new row completely.
  template <bool kInit = true, typename Admit>
  Upsert upsert(Shard& shard, std::int64_t id, std::uint64_t hash, std::uint32_t time, Admit&& admit) {
    const Search search = shard.index.search(id, hash);
    if (const auto slot = search.slot; search.found) {
      std::byte* const row = shard.rows.at(slot.row());
      if (shard.changes != nullptr) shard.changes->before_change(id, slot.row(), slot.time(), row);
      if (shard.feed != nullptr) shard.feed->before_change(id, slot.row());
      // Most batches carry the time that is there already; not writing keeps the cache line clean.
      if (slot.time() != time) slot.time() = time;
      return {row, true};
    }
    if (!admit()) return {nullptr, false};
    const std::uint32_t number = shard.rows.allocate();
    std::byte* const row = shard.rows.at(number);
    if constexpr (kInit) initialize(row, hash);
    try {
      if (shard.changes != nullptr) shard.changes->before_insert(number);
      if (shard.feed != nullptr) shard.feed->before_insert(number);
      shard.index.insert(search, id, hash, number, time);
    } catch (...) {
      shard.rows.free(number);
      throw;
    }
    if (shard.changes != nullptr) shard.changes->inserted(id, number);
    if (shard.feed != nullptr) shard.feed->inserted(id, number);
    return {row, false};
  }
  bool admits(std::int64_t id, std::uint32_t count) const { return admission == nullptr || admission->admit(id, count); }

  void initialize(std::byte* row, std::uint64_t hash) const {
    const std::uint64_t key = id_key(hash);
    if (layout.has_gaps) std::fill_n(row, layout.row_bytes, std::byte{0});
    for (const SegmentPlan& plan : plans) kernels->initialize(plan, key, row);
  }

  void erase(Shard& shard, ShardIndex::Slot slot, std::int64_t id, std::uint64_t hash) {
    const std::uint32_t row = slot.row();
    if (shard.feed != nullptr) shard.feed->before_erase(id);
    if (shard.changes != nullptr) shard.changes->before_erase(id, row, slot.time(), shard.rows.at(row));
    if (shard.feed != nullptr) shard.feed->erased(row);
    shard.index.erase(slot, hash);
    shard.rows.free(row);
  }

  // Some shard must be locked, or the mutex of `cut`.
  bool tracks() const noexcept { return shards[0]->changes != nullptr; }
  // Some shard must be locked, or the mutex of `feed`.
  bool feeds() const noexcept { return shards[0]->feed != nullptr; }
  std::vector<std::unique_lock<RwLock>> lock_all() const;
  // Of the reader of the cut, which holds its mutex. read_group looks at the next ids of the shard's list, finish_flight
  // appends its removed ids and goes on to the next shard that has any.
  void read_group(RowBatch& out);
  void finish_flight(std::vector<std::int64_t>& erased);
  void skip_empty_flights() noexcept;
  // Of the reader of the feed, which holds its mutex. The first is for the next ids of the shard, the second for all that were removed.
  void read_feed_group(FeedBatch& out);
  void read_feed_erased(FeedBatch& out);
  void end_cut() noexcept;

  // Calls f(shard, first, last) for runs of at most kGroup ids of one shard; takes no lock.
  template <typename F>
  void for_each_group(const Partition& batch, F&& f) const {
    for (std::uint32_t s = 0; s < kShards; ++s) for_each_group_of(s, batch, f);
  }
  template <typename F>
  void for_each_group_of(std::uint32_t s, const Partition& batch, F&& f) const {
    for (std::size_t first = batch.starts[s]; first < batch.starts[s + 1]; first += kGroup) {
      f(*shards[s], first, std::min<std::size_t>(first + kGroup, batch.starts[s + 1]));
    }
  }

  // Starts the fetching of what handling a group will touch: the buckets of all its ids at once, then the rows that are there.
  // The shard must be locked.
  [[gnu::always_inline]] void fetch_group(const Shard& shard, std::span<const std::int64_t> ids) const noexcept {
    for (const std::int64_t id : ids) fetch(shard.index.home(hash_id(id)));
    for (const std::int64_t id : ids) {
      const Bucket* const bucket = shard.index.home(hash_id(id));
      const std::uint32_t row = bucket->match(id).row;
      // An id that is not here ends its search in this bucket, or if that is full mostly in the next.
      const std::byte* const from = choose(row != 0, shard.rows.at(row), bucket + bucket->full());
      const std::size_t line_bytes = row != 0 ? 64 : 0;
      fetch_lines(from, lines(layout.row_bytes), line_bytes);
    }
  }

  // Starts the fetching of what a read, or an update, begins with. For the table that comes next.
  [[gnu::always_inline]] void fetch_views() const noexcept {
    const auto* const first = reinterpret_cast<const std::byte*>(views.data());
    for (std::size_t at = 0; at < sizeof(views); at += 64) fetch(first + at);
  }
  [[gnu::always_inline]] void fetch_views_and_locks() const noexcept {
    fetch_views();
    fetch_lines(reinterpret_cast<const std::byte*>(locks.data()), sizeof(locks) / 64);
  }

  // The ids of one call, or a piece of one, whose bags are row_splits; each id is a bag of its own if that is empty.
  // The vectors in `out` begin `stride` floats apart.
  void lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits, Pooling pooling, float* out,
              std::size_t stride) const;
  // While writers are at work. Each id is a bag of its own.
  void lookup_locked(const LookupPlan& plan, std::span<const std::int64_t> ids, float* out) const;

  void update_hashnet_scales(std::int64_t step) noexcept;
  struct Gradients {
    const float* values;
    std::size_t stride;
    const float* const* rows;    // as TableUpdate::rows
    const std::int64_t* counts;  // as TableUpdate::counts, or null
  };
  void apply(const Partition& batch, const Gradients& grads, const UpdateOptions& options);
  template <bool kAdd>
  void write_values(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time);
};

// Calls f; an InvalidArgument that it throws says which table it is about.
template <typename F>
void about_table(const Table& table, F&& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("table '" + table.config().name + "': " + error.what());
  }
}

// Throws InvalidArgument: positions inside a call are 32-bit.
void check_batch_size(std::size_t n);

}  // namespace monolith
