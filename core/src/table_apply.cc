// Table: applying gradients.
//
// The ids of a call are taken shard by shard, in units of a shard or a few. A unit passes through four stages: collect its unique
// ids and their summed gradients, match them against the index, resolve those that were not in their first bucket, step the rows.
// Three units are under way at once, each in another stage: a stage only touches memory that an earlier one has asked for, and there
// is always arithmetic to do while memory is on its way.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <type_traits>

#include "monolith/ragged.h"
#include "monolith/thread_pool.h"
#include "table_impl.h"

namespace monolith {
namespace {

// Batches below this are applied by one thread.
constexpr std::size_t kParallelIds = 8192;

// Ids in batches below that, of all tables of a request, from which it pays to apply them by several threads.
constexpr std::size_t kSmallIds = 4096;

// Shards are put together to units of at least this many ids: fewer would leave memory idle.
constexpr std::size_t kUnitIds = 64;

void require_training(const TableConfig& config, const char* call) {
  if (config.mode == Mode::kTraining) return;
  throw InvalidArgument(std::string(call) + ": table '" + config.name +
                        "' is a serving table without optimizer state; use assign, or a training table");
}

void check_update(const TableConfig& config, const UpdateOptions& options) {
  if (options.learning_rates.size() != config.segments.size()) {
    throw InvalidArgument("learning_rates: expected one per segment, " + std::to_string(config.segments.size()) + ", got " +
                          std::to_string(options.learning_rates.size()));
  }
  for (std::size_t i = 0; i < options.learning_rates.size(); ++i) {
    const float rate = options.learning_rates[i];
    const OptimizerKind kind = config.segments[i].optimizer.kind;
    const bool divides = kind == OptimizerKind::kFtrl || kind == OptimizerKind::kGroupFtrl || kind == OptimizerKind::kGroupAdagrad;
    if (!std::isfinite(rate) || rate < 0 || (divides && rate == 0)) {
      throw InvalidArgument("learning_rates[" + std::to_string(i) + "]: expected a finite number " + (divides ? "> 0" : ">= 0") +
                            ", got " + std::to_string(rate));
    }
  }
  if (options.step < 0) throw InvalidArgument("step: expected >= 0, got " + std::to_string(options.step));
}

// The locks of consecutive shards. Always taken in ascending order, as everybody does who holds more than one.
class ShardLocks {
 public:
  ~ShardLocks() { release(); }
  void acquire(std::span<RwLock> locks) noexcept {
    for (RwLock& lock : locks) lock.lock();
    held_ = locks;
  }
  void release() noexcept {
    for (RwLock& lock : held_) lock.unlock();
    held_ = {};
  }

 private:
  std::span<RwLock> held_;
};

// A unit and the memory of its arrays, which is kept from unit to unit.
class Unit : public UpdateUnit {
 public:
  std::size_t noted = 0, stepped = 0;  // how far the stages here are

  void start(std::size_t first_id, std::size_t last_id, const UpdatePlan& plan) {
    const std::size_t n = last_id - first_id;
    std::size_t capacity = 64;
    while (capacity < 2 * n) capacity *= 2;
    if (memory_ == nullptr || n > num_ids_) make_room(n, capacity);
    if ((n / 2 + 1) * plan.dim > sums_room_.size()) sums_room_ = std::vector<float>((n / 2 + 1) * plan.dim);
    sums = sums_room_.data();
    next = first_id;
    last = last_id;
    size = matched = noted = stepped = num_unmatched = num_sums = 0;
    if (plan.sequential) return;
    place_mask = capacity - 1;
    std::fill_n(places, capacity, 0);
  }

 private:
  // All arrays in one piece of memory.
  void make_room(std::size_t n, std::size_t capacity) {
    std::size_t bytes = 0;
    std::byte* base = nullptr;
    const auto carve = [&](auto*& array, std::size_t count) {
      using Element = std::remove_reference_t<decltype(*array)>;
      if (base != nullptr) array = reinterpret_cast<Element*>(base + bytes);
      bytes += (count * sizeof(Element) + 63) / 64 * 64;
    };
    const auto carve_all = [&] {
      bytes = 0;
      carve(ids, n);
      carve(buckets, n);
      carve(hashes, n);
      carve(counts, n);
      carve(grads, n);
      carve(snapshots, n);
      carve(rounding_keys, n);
      carve(rows, n);
      carve(matches, n);
      carve(unmatched, n + 1);  // one more is always written, and counts if it is one
      carve(places, capacity);
    };
    carve_all();  // to know the size
    memory_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    base = memory_.get();
    carve_all();
    num_ids_ = n;
  }

  std::unique_ptr<std::byte[]> memory_;
  std::size_t num_ids_ = 0;  // that there is room for
  std::vector<float> sums_room_;
};

class Update {
 public:
  Update(Table::Impl& impl, const UpdatePlan& plan, const Partition& batch, const UpdateOptions& options)
      : impl_(impl), plan_(plan), batch_(batch), options_(options), scratch_(2 * plan.dim) {}

  void run(std::uint32_t first_shard, std::uint32_t last_shard) {
    static thread_local std::array<Unit, 3> units;
    for (Unit& unit : units) unit.start(0, 0, plan_);
    std::array<ShardLocks, 3> locks;  // of the units; released by an exception too
    std::size_t turn = 0;
    // Two turns more than units: the last ones have to come out of the stages.
    for (int idle = 0; idle < 2; ++turn) {
      Unit& collecting = units[turn % 3];
      Unit& matching = units[(turn + 2) % 3];
      Unit& stepping = units[(turn + 1) % 3];
      const std::uint32_t begin = first_shard;
      while (first_shard < last_shard && batch_.starts[first_shard] - batch_.starts[begin] < kUnitIds) ++first_shard;
      idle += begin == first_shard;
      collecting.start(batch_.starts[begin], batch_.starts[first_shard], plan_);
      locks[turn % 3].acquire({impl_.locks.data() + begin, first_shard - begin});
      collecting.tracked = begin != first_shard && (impl_.tracks() || impl_.feeds());
      // match() finds there which sets to fetch, and note_changes() needs those. Each of the three is a turn after the other.
      for (std::uint32_t s = begin; collecting.tracked && s < first_shard; ++s) fetch(&impl_.shards[s]->feed);
      while (collecting.next < collecting.last || matching.matched < matching.size || stepping.stepped < stepping.size) {
        impl_.kernels->collect(plan_, collecting, std::min(collecting.next + kUpdateTurn, collecting.last));
        match(matching);
        step(stepping);
      }
      locks[(turn + 1) % 3].release();
      if (matching.tracked) note_changes(matching, matching.size);
      resolve(matching);
    }
  }

 private:
  void match(Unit& unit) {
    const std::size_t first = unit.matched;
    impl_.kernels->match(plan_, unit, std::min(first + kUpdateTurn, unit.size));
    if (!unit.tracked) return;
    if (impl_.feed_bits != nullptr) {
      FeedSet::prefetch(impl_.feed_bits->plane(0), {unit.matches + first, unit.matched - first});
    }
    for_each_shard(unit, first, unit.matched, [&](Shard& shard, std::size_t begin, std::size_t end) {
      if (shard.changes != nullptr) shard.changes->prefetch({unit.matches + begin, end - begin});
      fetch(shard.feed.get());
    });
    note_changes(unit, first);
  }

  // Of the ids before `last`, all of them matched in an earlier turn: their bits, and their rows if a cut needs copies of them,
  // had the time of a turn to arrive.
  void note_changes(Unit& unit, std::size_t last) {
    if (impl_.feed_bits != nullptr) {
      for_each_shard(unit, unit.noted, last, [](Shard& shard, std::size_t, std::size_t) { shard.feed->prefetch_list(); });
    }
    for_each_shard(unit, unit.noted, last, [&](Shard& shard, std::size_t begin, std::size_t end) {
      const std::span found(unit.matches + begin, end - begin);
      if (shard.changes != nullptr) {
        shard.changes->before_changes(found, unit.ids + begin, unit.buckets + begin, unit.rows + begin);
      }
      if (shard.feed != nullptr) shard.feed->before_changes(found, unit.ids + begin);
    });
    for (; unit.noted < last; ++unit.noted) {
      const Bucket::Match match = unit.matches[unit.noted];
      std::uint32_t& time = unit.buckets[unit.noted]->times[match.slot];
      if (match.row != 0 && time != options_.event_time) time = options_.event_time;
    }
  }

  // Calls f(shard, begin, end) for the ids from `first` to `last`, shard by shard, which is the order they are in.
  template <typename F>
  void for_each_shard(const Unit& unit, std::size_t first, std::size_t last, F&& f) {
    while (first < last) {
      const std::uint32_t shard = shard_of(unit.hashes[first]);
      std::size_t end = first + 1;
      while (end < last && shard_of(unit.hashes[end]) == shard) ++end;
      f(*impl_.shards[shard], first, end);
      first = end;
    }
  }

  // Finds or inserts what match() did not find.
  void resolve(Unit& unit) {
    bool refused = false;
    for (std::size_t i = 0; i < unit.num_unmatched; ++i) {
      const std::size_t at = unit.unmatched[i];
      const std::int64_t id = unit.ids[at];
      const std::uint64_t hash = unit.hashes[at];
      Shard& shard = *impl_.shards[shard_of(hash)];
      const auto found = impl_.upsert(shard, id, hash, options_.event_time, [&] { return impl_.admits(id, unit.counts[at] & ~kSummed); });
      unit.rows[at] = found.row;
      refused |= found.row == nullptr;
      if (found.existed) fetch_lines(found.row, plan_.row_lines);
    }
    if (!refused) return;
    // What follows sees only the ids that were admitted.
    std::size_t kept = 0;
    for (std::size_t at = 0; at < unit.size; ++at) {
      if (unit.rows[at] == nullptr) continue;
      unit.rows[kept] = unit.rows[at];
      unit.grads[kept] = unit.grads[at];
      unit.snapshots[kept] = unit.snapshots[at];
      unit.rounding_keys[kept] = unit.rounding_keys[at];
      ++kept;
    }
    unit.size = kept;
  }

  void step(Unit& unit) {
    const std::size_t first = unit.stepped;
    const std::size_t n = std::min(kUpdateTurn, unit.size - first);
    if (n == 0) return;
    unit.stepped += n;
    for (std::size_t p = 0; p < impl_.plans.size(); ++p) {
      const StepContext context{options_.learning_rates[p], impl_.hashnet_scale(p), options_.step, scratch_.data()};
      impl_.kernels->step(impl_.plans[p], context, unit.rows + first, unit.grads + first,
                          plan_.snapshot != nullptr ? unit.snapshots + first : nullptr, unit.rounding_keys + first, n);
    }
  }

  Table::Impl& impl_;
  const UpdatePlan& plan_;
  const Partition& batch_;
  const UpdateOptions& options_;
  std::vector<float> scratch_;
};

}  // namespace

void Table::Impl::update_hashnet_scales(std::int64_t step) noexcept {
  for (std::size_t s = 0; s < plans.size(); ++s) {
    if (plans[s].read_path != ReadPath::kHashNet) continue;
    const Compressor& c = config.segments[s].compressor;
    if (step % c.step_size != 0) continue;
    const double scale = c.init_scale * std::sqrt(1 + 0.005 * static_cast<double>(step));
    hashnet_scales[s].store(std::min(c.max_scale, static_cast<float>(scale)), std::memory_order_relaxed);
  }
}

void Table::Impl::apply(const Partition& batch, const Gradients& grads, const UpdateOptions& options) {
  const WriteGate::Writing writing(gate);
  note_event_time(options.event_time);
  update_hashnet_scales(options.step);
  lookups_since_update.store(0, std::memory_order_relaxed);
  const std::uint32_t number = updates.fetch_add(1, std::memory_order_relaxed);
  // More tasks than threads: a few popular ids make shards uneven.
  const std::size_t tasks =
      batch.ids.size() < kParallelIds || num_threads() == 1 ? 1 : std::min<std::size_t>(4 * num_threads(), kShards);
  const UpdatePlan plan{views.data(), region.addresses(), batch.ids.data(), batch.tags.data(), grads.values, grads.stride,
                        grads.rows, grads.counts, options.snapshot, table_key, number, layout.dim, lines(layout.row_bytes), options.event_time, options.sequential,
                        needs_id_keys};
  parallel_for(tasks, [&](std::size_t task) {
    const auto first = static_cast<std::uint32_t>(kShards * task / tasks);
    const auto last = static_cast<std::uint32_t>(kShards * (task + 1) / tasks);
    Update(*this, plan, batch, options).run(first, last);
  });
}

namespace {

void check_gradients(const TableUpdate& update) {
  check_update(update.table->config(), update.options);
  check_batch_size(update.ids.size());
  if (!update.counts.empty() && update.counts.size() != update.ids.size()) {
    throw InvalidArgument("counts: expected one per id, " + std::to_string(update.ids.size()) + ", got " +
                          std::to_string(update.counts.size()));
  }
  if (update.offsets.empty()) return;
  if (update.rows != nullptr || !update.counts.empty()) throw InvalidArgument("offsets: expected none with gradients by id");
  check_row_splits(update.offsets, update.ids.size(), update.offsets.front());
  if (update.options.snapshot != nullptr) throw InvalidArgument("snapshot: expected none with gradients of bags");
}

void apply_one(Table::Impl& impl, const TableUpdate& update) {
  const auto splits = update.offsets;
  const std::size_t dim = impl.layout.dim;
  const float* grads = update.grads;
  std::size_t stride = update.stride;
  std::vector<float> scaled;
  if (update.pooling != Pooling::kSum && !splits.empty()) {
    const std::size_t bags = splits.size() - 1;
    scaled.resize(bags * dim);
    for (std::size_t bag = 0; bag < bags; ++bag) {
      float* const to = scaled.data() + bag * dim;
      std::copy_n(grads + bag * stride, dim, to);
      impl.kernels->scale(to, pooling_factor(update.pooling, splits[bag + 1] - splits[bag]), dim);
    }
    grads = scaled.data();
    stride = dim;
  }
  Partition& batch = Partition::of_this_thread();
  batch.build(update.ids, splits);
  impl.apply(batch, {grads, stride, update.rows, update.counts.empty() ? nullptr : update.counts.data()}, update.options);
}

}  // namespace

void Table::apply_gradients(std::span<const std::int64_t> ids, const float* grads, const UpdateOptions& options) {
  const TableUpdate update{this, ids, {}, Pooling::kSum, grads, dim(), options};
  require_training(config(), "apply_gradients");
  check_gradients(update);
  apply_one(*impl_, update);
}

void Table::apply_pooled_gradients(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits,
                                   Pooling pooling, const float* grads, const UpdateOptions& options) {
  const TableUpdate update{this, ids, row_splits, pooling, grads, dim(), options};
  require_training(config(), "apply_pooled_gradients");
  check_row_splits(row_splits, ids.size());
  check_gradients(update);
  apply_one(*impl_, update);
}

void apply_many(std::span<const TableUpdate> updates) {
  std::vector<const Table*> tables;
  tables.reserve(updates.size());
  std::size_t in_small = 0;
  for (const TableUpdate& update : updates) {
    require_training(update.table->config(), "apply_gradients");
    about_table(*update.table, [&] { check_gradients(update); });
    tables.push_back(update.table);
    if (update.ids.size() < kParallelIds) in_small += update.ids.size();
  }
  std::ranges::sort(tables);
  if (const auto twice = std::ranges::adjacent_find(tables); twice != tables.end()) {
    throw InvalidArgument("table '" + (*twice)->config().name + "': expected each table once in a request, got it twice");
  }
  // A large batch uses all threads by itself. The small ones that are left are done by a thread each.
  std::vector<const TableUpdate*> small;
  small.reserve(updates.size());
  for (const TableUpdate& update : updates) {
    if (update.ids.size() < kParallelIds) {
      small.push_back(&update);
    } else {
      apply_one(*update.table->impl_, update);
    }
  }
  const auto run = [&](std::size_t i) {
    if (i + 1 < small.size()) small[i + 1]->table->impl_->fetch_views_and_locks();
    apply_one(*small[i]->table->impl_, *small[i]);
  };
  if (in_small >= kSmallIds) return parallel_for(small.size(), run);
  for (std::size_t i = 0; i < small.size(); ++i) run(i);
}

}  // namespace monolith
