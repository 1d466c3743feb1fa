// Table: everything that changes rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "monolith/ragged.h"
#include "monolith/thread_pool.h"
#include "table_impl.h"

namespace monolith {
namespace {

// Batches below this are applied by the calling thread alone.
constexpr std::size_t kParallelIds = 8192;

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

// The unique ids of one group and their summed gradients; memory is kept between groups.
class GradientSums {
 public:
  static GradientSums& of_this_thread() {
    static thread_local GradientSums sums;
    return sums;
  }

  std::vector<std::int64_t> ids;
  std::vector<const float*> grads;
  std::vector<const float*> snapshots;  // of the first occurrence
  std::vector<std::uint32_t> counts;

  // Sums in call order, so the result does not depend on threads.
  void collect(const Partition& batch, std::size_t first, std::size_t last, const float* all_grads, const float* snapshot,
               std::size_t dim, bool sequential, const Kernels& kernels) {
    const std::size_t n = last - first;
    ids.clear();
    grads.clear();
    snapshots.clear();
    counts.clear();
    used_ = 0;
    std::size_t capacity = 64;
    while (capacity < 2 * n) capacity *= 2;
    slots_.assign(sequential ? 0 : capacity, 0);
    if (!sequential && sums_.size() < (n / 2 + 1) * dim) sums_.resize((n / 2 + 1) * dim);
    for (std::size_t i = first; i < last; ++i) {
      if (i + 8 < last) __builtin_prefetch(all_grads + batch.tags[i + 8] * dim);
      const float* const grad = all_grads + batch.tags[i] * dim;
      if (!sequential && merge(batch.ids[i], grad, dim, capacity - 1, kernels)) continue;
      ids.push_back(batch.ids[i]);
      grads.push_back(grad);
      counts.push_back(1);
      if (snapshot != nullptr) snapshots.push_back(snapshot + batch.tags[i] * dim);
    }
  }

 private:
  // True if the id was there and the gradient has been added to its sum.
  bool merge(std::int64_t id, const float* grad, std::size_t dim, std::size_t mask, const Kernels& kernels) {
    for (std::size_t slot = hash_id(id) & mask;; slot = (slot + 1) & mask) {
      if (slots_[slot] == 0) {
        slots_[slot] = static_cast<std::uint32_t>(ids.size() + 1);
        return false;
      }
      const std::size_t unique = slots_[slot] - 1;
      if (ids[unique] != id) continue;
      float* sum = const_cast<float*>(grads[unique]);
      if (counts[unique] == 1) {
        sum = sums_.data() + used_;
        used_ += dim;
        std::memcpy(sum, grads[unique], dim * sizeof(float));
        grads[unique] = sum;
      }
      kernels.add_scaled(sum, grad, 1, dim);
      ++counts[unique];
      return true;
    }
  }

  std::vector<std::uint32_t> slots_;  // position in ids, plus 1
  std::vector<float> sums_;
  std::size_t used_ = 0;
};

bool is_zero(const float* value, std::size_t n) {
  float square = 0;
  for (std::size_t i = 0; i < n; ++i) square += value[i] * value[i];
  return square < std::numeric_limits<float>::min();
}

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

void Table::Impl::apply_groups(const Partition& batch, std::uint32_t first_shard, std::uint32_t last_shard,
                               const float* grads, const UpdateOptions& options, std::uint32_t update) {
  const std::size_t dim = layout.dim;
  GradientSums& sums = GradientSums::of_this_thread();
  std::array<ShardIndex::Slot, kGroup> slots;
  std::array<std::byte*, kGroup> rows;
  std::array<const float*, kGroup> row_grads;
  std::array<const float*, kGroup> row_snapshots;
  std::array<std::uint64_t, kGroup> keys;
  std::vector<float> scratch(2 * dim);
  const std::uint32_t row_lines = lines(layout.row_bytes);
  for (std::uint32_t s = first_shard; s < last_shard; ++s) {
    if (batch.starts[s] == batch.starts[s + 1]) continue;
    // Duplicates always share a shard, so a shard's ids are deduplicated on their own, before its lock is taken.
    sums.collect(batch, batch.starts[s], batch.starts[s + 1], grads, options.snapshot, dim, options.sequential, *kernels);
    Shard& shard = *shards[s];
    for (std::size_t first = 0; first < sums.ids.size(); first += kGroup) {
      const std::size_t count = std::min(kGroup, sums.ids.size() - first);
      const std::lock_guard guard(shard.lock);
      shard.index.find({sums.ids.data() + first, count}, slots.data(), [&](ShardIndex::Slot slot) {
        prefetch<1>(shard.rows.at(slot.row()), row_lines);
      });
      std::size_t n = 0;
      bool moved = false;  // an insert may move other ids of the shard: what find() said is then out of date
      for (std::size_t i = first; i < first + count; ++i) {
        const std::int64_t id = sums.ids[i];
        const std::uint64_t hash = hash_id(id);
        const auto slot = moved ? shard.index.find(id, hash) : slots[i - first];
        const Upsert found = upsert(shard, slot, id, hash, options.event_time, [&] { return admits(id, sums.counts[i]); });
        moved |= !found.existed;
        if (found.row == nullptr) continue;
        rows[n] = found.row;
        row_grads[n] = sums.grads[i];
        if (options.snapshot != nullptr) row_snapshots[n] = sums.snapshots[i];
        if (needs_id_keys) keys[n] = id_key(hash);
        ++n;
      }
      for (std::size_t p = 0; p < plans.size(); ++p) {
        const StepContext context{options.learning_rates[p], hashnet_scale(p), options.step, update, scratch.data()};
        kernels->step(plans[p], context, rows.data(), row_grads.data(),
                      options.snapshot != nullptr ? row_snapshots.data() : nullptr, keys.data(), n);
      }
    }
  }
}

void Table::Impl::apply(const Partition& batch, const float* grads, const UpdateOptions& options) {
  note_event_time(options.event_time);
  update_hashnet_scales(options.step);
  prefetch_small_batch(batch);
  const std::uint32_t update = updates.fetch_add(1, std::memory_order_relaxed);
  const std::size_t tasks = batch.ids.size() < kParallelIds ? 1 : std::min<std::size_t>(4 * num_threads(), kShards);
  if (tasks == 1 || num_threads() == 1) return apply_groups(batch, 0, kShards, grads, options, update);
  // More tasks than threads: a few popular ids make shards uneven.
  parallel_for(tasks, [&](std::size_t task) {
    const auto first = static_cast<std::uint32_t>(kShards * task / tasks);
    const auto last = static_cast<std::uint32_t>(kShards * (task + 1) / tasks);
    apply_groups(batch, first, last, grads, options, update);
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

template <bool kAdd>
void Table::Impl::write_values(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time) {
  check_batch_size(ids.size());
  note_event_time(event_time);
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  std::vector<float> sum(layout.dim);
  for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    for (std::size_t i = first; i < last; ++i) {
      const std::int64_t id = batch.ids[i];
      const std::uint64_t hash = hash_id(id);
      const float* value = values + batch.tags[i] * layout.dim;
      if (!kAdd && config.skip_zero_rows && is_zero(value, layout.dim)) {
        if (const auto slot = shard.index.find(id, hash)) erase(shard, slot, hash);
        continue;
      }
      const Upsert found = upsert(shard, id, hash, event_time, [&] { return admits(id, 1); });
      if (found.row == nullptr) continue;
      if constexpr (kAdd) {
        for (const SegmentPlan& plan : plans) kernels->load(plan, found.row, sum.data() + plan.value_offset);
        kernels->add_scaled(sum.data(), value, 1, layout.dim);
        value = sum.data();
      }
      for (const SegmentPlan& plan : plans) kernels->store(plan, value + plan.value_offset, found.row);
    }
  });
}

void Table::assign(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time) {
  impl_->write_values<false>(ids, values, event_time);
}

void Table::assign_add(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time) {
  impl_->write_values<true>(ids, values, event_time);
}

void Table::reinitialize(std::span<const std::int64_t> ids, std::uint32_t event_time, std::int32_t* existed) {
  check_batch_size(ids.size());
  impl_->note_event_time(event_time);
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    for (std::size_t i = first; i < last; ++i) {
      const std::uint64_t hash = hash_id(batch.ids[i]);
      const auto found = impl_->upsert(shard, batch.ids[i], hash, event_time, [] { return true; });
      if (found.existed) impl_->initialize(found.row, hash);
      existed[batch.tags[i]] = found.existed ? 1 : 0;
    }
  });
}

void Table::erase(std::span<const std::int64_t> ids, bool* erased) {
  check_batch_size(ids.size());
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    for (std::size_t i = first; i < last; ++i) {
      const std::uint64_t hash = hash_id(batch.ids[i]);
      const auto slot = shard.index.find(batch.ids[i], hash);
      erased[batch.tags[i]] = static_cast<bool>(slot);
      if (slot) impl_->erase(shard, slot, hash);
    }
  });
}

std::uint64_t Table::evict(std::uint32_t now) {
  std::uint64_t evicted = 0;
  std::vector<std::int64_t> ids;
  for (const auto& shard : impl_->shards) {
    std::uint64_t position = 0;
    do {
      // One block at a time, so that training waits microseconds for an eviction of any size.
      const std::lock_guard guard(shard->lock);
      ids.clear();
      position = shard->index.scan_block(position, [&](std::int64_t id, std::uint64_t, ShardIndex::Slot slot) {
        if (expired(id, slot.time(), now)) ids.push_back(id);
      });
      for (const std::int64_t id : ids) {
        const std::uint64_t hash = hash_id(id);
        impl_->erase(*shard, shard->index.find(id, hash), hash);
      }
      evicted += ids.size();
    } while (position != 0);
  }
  return evicted;
}

void Table::clear() {
  // All shards at once: their rows share one arena.
  std::vector<std::unique_lock<RwLock>> guards;
  guards.reserve(kShards);
  for (const auto& shard : impl_->shards) guards.emplace_back(shard->lock);
  for (const auto& shard : impl_->shards) {
    shard->index.clear();
    shard->rows.clear();
  }
  impl_->blocks.forget();
  impl_->arena.release();
}

void Table::insert_raw(std::span<const std::int64_t> ids, std::span<const std::uint32_t> times,
                       std::span<const std::byte> rows) {
  check_batch_size(ids.size());
  const std::size_t row_bytes = impl_->layout.row_bytes;
  if (times.size() != ids.size() || rows.size() != ids.size() * row_bytes) {
    throw InvalidArgument("insert_raw: ids, times and rows disagree in length");
  }
  if (!times.empty()) impl_->note_event_time(*std::max_element(times.begin(), times.end()));
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    for (std::size_t i = first; i < last; ++i) {
      const std::uint32_t from = batch.tags[i];
      const auto found =
          impl_->upsert<false>(shard, batch.ids[i], hash_id(batch.ids[i]), times[from], [] { return true; });
      std::memcpy(found.row, rows.data() + from * row_bytes, row_bytes);
    }
  });
}

}  // namespace monolith
