// Table: applying gradients.
//
// The ids of a call are taken shard by shard, in units of a shard or a few. A unit passes through four stages: collect its unique
// ids and their summed gradients, match them against the index, resolve those that were not in their first bucket, step the rows.
// Three units are under way at once, each in another stage, and their loops are interleaved: a stage only touches memory that an
// earlier one has asked for, and there is always arithmetic to do while memory is on its way.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "monolith/ragged.h"
#include "monolith/thread_pool.h"
#include "table_impl.h"

namespace monolith {
namespace {

// Batches below this are applied by the calling thread alone.
constexpr std::size_t kParallelIds = 8192;

// Shards are put together to units of at least this many ids: fewer would leave memory idle.
constexpr std::size_t kUnitIds = 64;

// Ids of one stage before the next stage has its turn.
constexpr std::size_t kTurn = 16;

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
  void acquire(std::span<const std::unique_ptr<Shard>> shards) {
    for (const auto& shard : shards) shard->lock.lock();
    held_ = shards;
  }
  void release() noexcept {
    for (const auto& shard : held_) shard->lock.unlock();
    held_ = {};
  }

 private:
  std::span<const std::unique_ptr<Shard>> held_;
};

// The ids of one or a few shards on their way through the stages. Memory is kept from unit to unit.
struct Unit {
  std::size_t next = 0, last = 0;  // the part of the batch that is not collected yet
  bool tracked = false;            // changes are to be remembered

  // By unique id. After resolve() without the ids that were not admitted.
  std::size_t size = 0;
  std::vector<std::int64_t> ids;
  std::vector<Bucket*> buckets;           // the first bucket of the id
  std::vector<const ShardView*> shards;  // where it is
  std::vector<std::uint32_t> counts;
  std::vector<const float*> grads;
  std::vector<const float*> snapshots;  // of the first occurrence
  std::vector<std::uint64_t> rounding_keys;
  std::vector<std::byte*> rows;

  std::size_t matched = 0, noted = 0, stepped = 0;  // how far the stages are
  std::vector<Bucket::Guess> guesses;               // if tracked
  std::vector<std::uint32_t> unmatched;
  std::size_t num_unmatched = 0;

  std::vector<std::uint32_t> places;  // a hash table of positions in `ids`, plus 1
  std::vector<float> sums;            // gradients of ids that occur more than once
  std::size_t num_sums = 0;

  void start(std::size_t first_id, std::size_t last_id, std::size_t dim, bool sequential) {
    next = first_id;
    last = last_id;
    size = matched = noted = stepped = num_unmatched = num_sums = 0;
    const std::size_t n = last_id - first_id;
    if (ids.size() < n) {
      buckets.resize(n);
      shards.resize(n);
      counts.resize(n);
      grads.resize(n);
      snapshots.resize(n);
      rounding_keys.resize(n);
      rows.resize(n);
      unmatched.resize(n);
      guesses.resize(n);
      ids.resize(n);  // last: if one of the others failed, its size must not say that all are there
    }
    std::size_t capacity = 64;
    while (capacity < 2 * n) capacity *= 2;
    places.assign(sequential ? 1 : capacity, 0);
    if (sums.size() < (n / 2 + 1) * dim) sums.resize((n / 2 + 1) * dim);
  }
};

class Update {
 public:
  Update(Table::Impl& impl, const Partition& batch, const float* grads, const UpdateOptions& options, std::uint32_t number)
      : impl_(impl),
        batch_(batch),
        grads_(grads),
        options_(options),
        number_(number),
        dim_(impl.layout.dim),
        row_lines_(impl.lines(impl.layout.row_bytes)),
        scratch_(2 * dim_) {}

  void run(std::uint32_t first_shard, std::uint32_t last_shard) {
    static thread_local std::array<Unit, 3> units;
    for (Unit& unit : units) unit.start(0, 0, dim_, options_.sequential);
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
      collecting.start(batch_.starts[begin], batch_.starts[first_shard], dim_, options_.sequential);
      locks[turn % 3].acquire({impl_.shards.data() + begin, first_shard - begin});
      collecting.tracked = begin != first_shard && impl_.tracks();
      while (collecting.next < collecting.last || matching.matched < matching.size || stepping.stepped < stepping.size) {
        collect(collecting);
        matching.tracked ? match<true>(matching) : match<false>(matching);
        step(stepping);
      }
      locks[(turn + 1) % 3].release();
      if (matching.tracked) note_changes(matching, matching.size);
      resolve(matching);
    }
  }

 private:
  [[gnu::noinline]] void collect(Unit& unit) {
    const std::size_t last = std::min(unit.next + kTurn, unit.last);
    for (std::size_t i = unit.next; i < last; ++i) fetch(grads_ + batch_.tags[i] * dim_);
    for (; unit.next < last; ++unit.next) {
      const std::size_t i = unit.next;
      const std::int64_t id = batch_.ids[i];
      const std::uint64_t hash = hash_id(id);
      const float* const grad = grads_ + batch_.tags[i] * dim_;
      if (!options_.sequential && merge(unit, id, hash, grad)) continue;
      const std::size_t at = unit.size++;
      const ShardView& shard = impl_.views[shard_of(hash)];
      Bucket* const bucket = shard.home(hash);
      fetch(bucket);
      unit.ids[at] = id;
      unit.shards[at] = &shard;
      unit.buckets[at] = bucket;
      unit.counts[at] = 1;
      unit.grads[at] = grad;
      if (options_.snapshot != nullptr) unit.snapshots[at] = options_.snapshot + batch_.tags[i] * dim_;
      // Draws depend on the id, the number of the call and the place in it, never on which thread ran, so that the same data
      // trains to the same bits.
      if (impl_.needs_id_keys) {
        unit.rounding_keys[at] = impl_.id_key(hash) + ((std::uint64_t{number_} << 32) + i + 1) * 0x9E3779B97F4A7C15ull;
      }
    }
  }

  // True if the id was there and the gradient has been added to its sum. Sums are made in call order.
  bool merge(Unit& unit, std::int64_t id, std::uint64_t hash, const float* grad) {
    const std::size_t mask = unit.places.size() - 1;
    for (std::size_t place = (hash >> 32) & mask;; place = (place + 1) & mask) {
      if (unit.places[place] == 0) {
        unit.places[place] = static_cast<std::uint32_t>(unit.size + 1);
        return false;
      }
      const std::size_t at = unit.places[place] - 1;
      if (unit.ids[at] != id) continue;
      const float* const before = unit.grads[at];
      float* const sum = unit.counts[at]++ == 1 ? unit.sums.data() + unit.num_sums++ * dim_ : const_cast<float*>(before);
      impl_.kernels->add(sum, before, grad, dim_);
      unit.grads[at] = sum;
      return true;
    }
  }

  template <bool kTracked>
  [[gnu::noinline]] void match(Unit& unit) {
    const std::uint32_t row_bytes = impl_.layout.row_bytes;
    const std::size_t first = unit.matched;
    const std::size_t last = std::min(first + kTurn, unit.size);
    for (; unit.matched < last; ++unit.matched) {
      const std::size_t at = unit.matched;
      Bucket* const bucket = unit.buckets[at];
      // No branch on whether the id is in its first bucket: see kernels/lookup.h.
      const Bucket::Guess guess = bucket->guess(unit.ids[at]);
      // Row 0 for an id that is not here: the place of any other would have to be fetched in vain.
      std::byte* const row = unit.shards[at]->row(guess.right ? bucket->rows[guess.slot] : 0, row_bytes);
      // An id that is not there ends its search here, unless the bucket is full.
      const auto* const next = reinterpret_cast<const std::byte*>(bucket + bucket->full());
      fetch_lines(guess.right ? row : next, row_lines_, guess.right ? 64 : 0);
      unit.rows[at] = row;
      unit.unmatched[unit.num_unmatched] = static_cast<std::uint32_t>(at);
      unit.num_unmatched += !guess.right;
      if constexpr (kTracked) {
        unit.guesses[at] = guess;
        impl_.changes_of(*unit.shards[at]).prefetch(bucket->rows[guess.slot]);
      } else {
        set_time(*bucket, guess);
      }
    }
    if constexpr (kTracked) note_changes(unit, first);
  }

  // Of the ids before `last`, all of them matched in an earlier turn: their bits, and their rows if a cut needs copies of them,
  // had the time of a turn to arrive.
  void note_changes(Unit& unit, std::size_t last) {
    for (; unit.noted < last; ++unit.noted) {
      const std::size_t at = unit.noted;
      const Bucket::Guess guess = unit.guesses[at];
      Bucket& bucket = *unit.buckets[at];
      const std::uint32_t row = guess.right ? bucket.rows[guess.slot] : 0;
      impl_.changes_of(*unit.shards[at]).before_change(unit.ids[at], row, bucket.times[guess.slot], unit.rows[at]);
      set_time(bucket, guess);
    }
  }

  void set_time(Bucket& bucket, Bucket::Guess guess) const noexcept {
    // Most batches carry the time that is there already; not writing keeps the cache line clean.
    const std::uint32_t time = bucket.times[guess.slot];
    if (guess.right && time != options_.event_time) bucket.times[guess.slot] = options_.event_time;
  }

  // Finds or inserts what match() did not find.
  void resolve(Unit& unit) {
    bool refused = false;
    for (std::size_t i = 0; i < unit.num_unmatched; ++i) {
      const std::size_t at = unit.unmatched[i];
      const std::int64_t id = unit.ids[at];
      const std::uint64_t hash = hash_id(id);
      Shard& shard = *impl_.shards[shard_of(hash)];
      const auto found = impl_.upsert(shard, id, hash, options_.event_time, [&] { return impl_.admits(id, unit.counts[at]); });
      unit.rows[at] = found.row;
      refused |= found.row == nullptr;
      if (found.existed) fetch_lines(found.row, row_lines_);
    }
    if (!refused) return;
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

  [[gnu::noinline]] void step(Unit& unit) {
    const std::size_t first = unit.stepped;
    const std::size_t n = std::min(kTurn, unit.size - first);
    if (n == 0) return;
    unit.stepped += n;
    for (std::size_t p = 0; p < impl_.plans.size(); ++p) {
      const StepContext context{options_.learning_rates[p], impl_.hashnet_scale(p), options_.step, scratch_.data()};
      impl_.kernels->step(impl_.plans[p], context, unit.rows.data() + first, unit.grads.data() + first,
                          options_.snapshot != nullptr ? unit.snapshots.data() + first : nullptr,
                          unit.rounding_keys.data() + first, n);
    }
  }

  Table::Impl& impl_;
  const Partition& batch_;
  const float* grads_;
  const UpdateOptions& options_;
  std::uint32_t number_;
  std::size_t dim_;
  std::uint32_t row_lines_;
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

void Table::Impl::apply(const Partition& batch, const float* grads, const UpdateOptions& options) {
  const WriteGate::Writing writing(gate);
  note_event_time(options.event_time);
  update_hashnet_scales(options.step);
  const std::uint32_t number = updates.fetch_add(1, std::memory_order_relaxed);
  // More tasks than threads: a few popular ids make shards uneven.
  const std::size_t tasks =
      batch.ids.size() < kParallelIds || num_threads() == 1 ? 1 : std::min<std::size_t>(4 * num_threads(), kShards);
  parallel_for(tasks, [&](std::size_t task) {
    const auto first = static_cast<std::uint32_t>(kShards * task / tasks);
    const auto last = static_cast<std::uint32_t>(kShards * (task + 1) / tasks);
    Update(*this, batch, grads, options, number).run(first, last);
  });
}

void Table::apply_gradients(std::span<const std::int64_t> ids, const float* grads, const UpdateOptions& options) {
  require_training(config(), "apply_gradients");
  check_update(config(), options);
  check_batch_size(ids.size());
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->apply(batch, grads, options);
}

void Table::apply_pooled_gradients(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits,
                                   Pooling pooling, const float* grads, const UpdateOptions& options) {
  require_training(config(), "apply_pooled_gradients");
  check_update(config(), options);
  check_batch_size(ids.size());
  check_row_splits(row_splits, ids.size());
  const std::size_t bags = row_splits.size() - 1;
  const std::size_t dim = impl_->layout.dim;
  std::vector<float> scaled;
  if (pooling != Pooling::kSum) {
    scaled.assign(grads, grads + bags * dim);
    for (std::size_t bag = 0; bag < bags; ++bag) {
      impl_->kernels->scale(scaled.data() + bag * dim, pooling_factor(pooling, row_splits[bag + 1] - row_splits[bag]), dim);
    }
    grads = scaled.data();
  }
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, row_splits);
  impl_->apply(batch, grads, options);
}

}  // namespace monolith
