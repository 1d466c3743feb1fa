// Table: everything that changes rows, except gradients (table_apply.cc).
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "table_impl.h"

namespace monolith {
namespace {

bool is_zero(const float* value, std::size_t n) {
  float square = 0;
  for (std::size_t i = 0; i < n; ++i) square += value[i] * value[i];
  return square < std::numeric_limits<float>::min();
}

// Everything that clearing a shard with change tracking or a feed needs memory for. Returns its ids.
std::vector<std::int64_t> before_clear(Shard& shard) {
  std::vector<std::int64_t> ids;
  ids.reserve(shard.index.size());
  if (shard.changes != nullptr) shard.changes->before_clear(shard.index.size());
  if (shard.feed != nullptr) shard.feed->before_clear(shard.index.size());
  shard.index.for_each([&](std::int64_t id, std::uint64_t, ShardIndex::Slot slot) {
    ids.push_back(id);
    if (shard.changes == nullptr) return;
    if (shard.changes->in_flight(slot.row())) shard.changes->save(id, slot.row(), slot.time(), shard.rows.at(slot.row()));
  });
  return ids;
}

}  // namespace

template <bool kAdd>
void Table::Impl::write_values(std::span<const std::int64_t> ids, const float* values, std::uint32_t event_time) {
  check_batch_size(ids.size());
  const WriteGate::Writing writing(gate);
  note_event_time(event_time);
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  std::vector<float> sum(layout.dim);
  for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    fetch_group(shard, batch.group(first, last));
    for (std::size_t i = first; i < last; ++i) {
      const std::int64_t id = batch.ids[i];
      const std::uint64_t hash = hash_id(id);
      const float* value = values + batch.tags[i] * layout.dim;
      if (!kAdd && config.skip_zero_rows && is_zero(value, layout.dim)) {
        if (const auto slot = shard.index.find(id, hash)) erase(shard, slot, id, hash);
        continue;
      }
      const Upsert found = upsert(shard, id, hash, event_time, [&] { return admits(id, 1); });
      if (found.row == nullptr) continue;
      if constexpr (kAdd) {
        for (const SegmentPlan& plan : plans) kernels->load(plan, found.row, sum.data() + plan.value_offset);
        kernels->add(sum.data(), sum.data(), value, layout.dim);
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
  const WriteGate::Writing writing(impl_->gate);
  impl_->note_event_time(event_time);
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    impl_->fetch_group(shard, batch.group(first, last));
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
  const WriteGate::Writing writing(impl_->gate);
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    impl_->fetch_group(shard, batch.group(first, last));
    for (std::size_t i = first; i < last; ++i) {
      const std::uint64_t hash = hash_id(batch.ids[i]);
      const auto slot = shard.index.find(batch.ids[i], hash);
      erased[batch.tags[i]] = static_cast<bool>(slot);
      if (slot) impl_->erase(shard, slot, batch.ids[i], hash);
    }
  });
}

std::uint64_t Table::evict(std::uint32_t now) {
  const WriteGate::Writing writing(impl_->gate);
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
        impl_->erase(*shard, shard->index.find(id, hash), id, hash);
      }
      evicted += ids.size();
    } while (position != 0);
  }
  return evicted;
}

void Table::clear() {
  const WriteGate::Writing writing(impl_->gate);
  // All shards at once: their rows share one region.
  const auto guards = impl_->lock_all();
  std::array<std::vector<std::int64_t>, kShards> gone;
  if (impl_->tracks() || impl_->feeds()) {
    for (std::uint32_t s = 0; s < kShards; ++s) gone[s] = before_clear(*impl_->shards[s]);
  }
  for (std::uint32_t s = 0; s < kShards; ++s) {
    Shard& shard = *impl_->shards[s];
    shard.index.clear();
    shard.rows.clear();
    if (shard.changes != nullptr) shard.changes->cleared(gone[s]);
    if (shard.feed != nullptr) shard.feed->cleared(gone[s]);
  }
  if (impl_->tracks()) impl_->change_bits->clear();
  if (impl_->feeds()) impl_->feed_bits->clear();
  impl_->blocks.release();
  impl_->region.release();
}

void Table::insert_raw(std::span<const std::int64_t> ids, std::span<const std::uint32_t> times,
                       std::span<const std::byte> rows) {
  check_batch_size(ids.size());
  const std::size_t row_bytes = impl_->layout.row_bytes;
  if (times.size() != ids.size() || rows.size() != ids.size() * row_bytes) {
    throw InvalidArgument("insert_raw: ids, times and rows disagree in length");
  }
  const WriteGate::Writing writing(impl_->gate);
  if (!times.empty()) impl_->note_event_time(*std::max_element(times.begin(), times.end()));
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](Shard& shard, std::size_t first, std::size_t last) {
    const std::lock_guard guard(shard.lock);
    impl_->fetch_group(shard, batch.group(first, last));
    for (std::size_t i = first; i < last; ++i) {
      const std::uint32_t from = batch.tags[i];
      const auto found =
          impl_->upsert<false>(shard, batch.ids[i], hash_id(batch.ids[i]), times[from], [] { return true; });
      std::memcpy(found.row, rows.data() + from * row_bytes, row_bytes);
    }
  });
}

}  // namespace monolith
