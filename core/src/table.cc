// Table: construction, reads, scans and bookkeeping. Writes are in table_apply.cc and table_update.cc, what changed in
// table_changes.cc.
#include "monolith/table.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "monolith/ragged.h"
#include "monolith/thread_pool.h"
#include "table_impl.h"

namespace monolith {
namespace {

// Fewer ids than this, of all tables, are not worth waking another thread for.
constexpr std::size_t kIdsPerThread = 4096;

// A table that is trained is looked up a few times between two updates, one that serves much more often.
constexpr std::uint32_t kLookupsBesideUpdates = 16;

// About how many ids pass through the gate at once: a writer waits for them. A bag is never split, a huge one takes longer.
constexpr std::size_t kLookupPiece = 8192;

SegmentPlan make_plan(const SegmentLayout& layout, Mode mode) {
  const Segment& segment = layout.config;
  const Compressor& compressor = segment.compressor;
  SegmentPlan plan{};
  plan.dim = segment.dim;
  plan.value_offset = layout.value_offset;
  plan.weight_offset = layout.weight_offset;
  plan.state_offset = layout.state_offset;
  plan.initializer = segment.initializer;
  plan.optimizer = segment.optimizer;
  plan.has_state = mode == Mode::kTraining;
  plan.quantum = compressor.range / 128;
  plan.amplitude = compressor.amplitude;
  if (mode == Mode::kTraining) {
    plan.storage = segment.precision == Precision::kFp32   ? Storage::kFp32
                   : segment.precision == Precision::kFp16 ? Storage::kFp16
                                                           : Storage::kBf16;
    plan.read_path = compressor.kind == CompressorKind::kFixedR8  ? ReadPath::kFakeQuant
                     : compressor.kind == CompressorKind::kOneBit ? ReadPath::kHashNet
                                                                  : ReadPath::kRaw;
    plan.stochastic_rounding = segment.stochastic_rounding && plan.storage != Storage::kFp32;
  } else {
    static constexpr Storage storages[] = {Storage::kFp32, Storage::kFp16, Storage::kBf16, Storage::kFixed8,
                                           Storage::kSign8};
    plan.storage = storages[static_cast<std::size_t>(compressor.kind)];
    plan.read_path = ReadPath::kRaw;
  }
  return plan;
}

std::uint64_t key_of(std::uint64_t seed, const std::string& name) {
  std::uint64_t key = hash_id(static_cast<std::int64_t>(seed));
  for (const char c : name) key = hash_id(static_cast<std::int64_t>(key ^ static_cast<unsigned char>(c)));
  return key;
}

// Empty if all slots have the default.
std::vector<std::uint64_t> expiry_by_slot(const TableConfig& config) {
  std::vector<std::uint64_t> seconds_of;
  if (config.slot_expiry_seconds.empty()) return seconds_of;
  seconds_of.assign(SlotThresholds::kSlots, config.default_expiry_seconds);
  for (const auto& [slot, seconds] : config.slot_expiry_seconds) {
    if (slot >= SlotThresholds::kSlots) {
      throw InvalidArgument("slot_expiry_seconds: expected slots below 32768, got " + std::to_string(slot));
    }
    seconds_of[slot] = seconds;
  }
  return seconds_of;
}

std::size_t tasks_for(std::size_t ids) { return std::clamp<std::size_t>(ids / kIdsPerThread, 1, num_threads()); }

}  // namespace

void check_batch_size(std::size_t n) {
  if (n > std::numeric_limits<std::uint32_t>::max()) {
    throw InvalidArgument("ids: expected fewer than 2^32 in one call, got " + std::to_string(n) + "; split the batch");
  }
}

Partition& Partition::of_this_thread() {
  static thread_local Partition partition;
  return partition;
}

void Partition::build(std::span<const std::int64_t> call_ids, std::span<const std::int64_t> row_splits) {
  const std::size_t n = call_ids.size();
  ids.resize(n);
  tags.resize(n);
  call_shards.resize(n);
  kernels().find_shards(call_ids.data(), n, call_shards.data());
  std::array<std::uint32_t, kShards> next{};
  for (std::size_t i = 0; i < n; ++i) ++next[call_shards[i]];
  std::uint32_t total = 0;
  for (std::uint32_t s = 0; s < kShards; ++s) {
    starts[s] = total;
    total += next[s];
    next[s] = starts[s];
  }
  starts[kShards] = total;
  const auto put = [&](std::size_t i, std::size_t tag) {
    const std::uint32_t at = next[call_shards[i]]++;
    ids[at] = call_ids[i];
    tags[at] = static_cast<std::uint32_t>(tag);
  };
  if (row_splits.empty()) {
    for (std::size_t i = 0; i < n; ++i) put(i, i);
    return;
  }
  const std::int64_t base = row_splits.front();
  for (std::size_t bag = 0; bag + 1 < row_splits.size(); ++bag) {
    for (std::int64_t i = row_splits[bag]; i < row_splits[bag + 1]; ++i) put(static_cast<std::size_t>(i - base), bag);
  }
}

Table::Impl::Impl(TableConfig table_config, std::shared_ptr<AdmissionFilter> filter)
    : config(std::move(table_config)),
      layout(config),
      admission(std::move(filter)),
      kernels(&monolith::kernels()),
      table_key(key_of(config.seed, config.name)) {
  hashnet_scales = std::make_unique<std::atomic<float>[]>(layout.segments.size());
  for (std::size_t i = 0; i < layout.segments.size(); ++i) {
    plans.push_back(make_plan(layout.segments[i], config.mode));
    needs_id_keys |= plans.back().stochastic_rounding;
    hashnet_scales[i] = config.segments[i].compressor.init_scale;
  }
  slot_expiry = expiry_by_slot(config);
  if (config.initial_capacity > 0) {
    constexpr std::uint64_t kIndexBytesPerRow = 34;  // at the average load of a growing table
    region.check_room(config.initial_capacity);
    blocks.reserve(config.initial_capacity * kIndexBytesPerRow);
  }
  shards.reserve(kShards);
  for (std::uint32_t i = 0; i < kShards; ++i) {
    shards.push_back(std::make_unique<Shard>(locks[i], region, blocks, views[i], i));
  }
}

void Table::Impl::reconfigure(const TableConfig& other, std::shared_ptr<AdmissionFilter> filter) {
  const RowLayout rows(other);
  if (other.name != config.name || other.seed != config.seed || other.mode != config.mode ||
      other.unseen_reads_zeros != config.unseen_reads_zeros || other.skip_zero_rows != config.skip_zero_rows ||
      rows.describe() != layout.describe()) {
    throw InvalidArgument("reconfigure: expected the name, seed, mode and layout of table '" + config.name + "', " +
                          layout.describe() + ", got those of '" + other.name + "', " + rows.describe());
  }
  std::vector<Segment> segments = other.segments;
  std::vector<std::uint64_t> expiry = expiry_by_slot(other);
  auto slot_seconds = other.slot_expiry_seconds;
  // Nothing below throws. Lookups read the plans behind the gate or with the lock of a shard.
  const WriteGate::Writing writing(gate);
  const auto guards = lock_all();
  needs_id_keys = false;
  for (std::size_t i = 0; i < plans.size(); ++i) {
    plans[i] = make_plan(rows.segments[i], config.mode);
    layout.segments[i].config = rows.segments[i].config;
    needs_id_keys |= plans[i].stochastic_rounding;
  }
  config.segments.swap(segments);
  config.initial_capacity = other.initial_capacity;
  config.default_expiry_seconds = other.default_expiry_seconds;
  config.slot_expiry_seconds.swap(slot_seconds);
  slot_expiry.swap(expiry);
  admission.swap(filter);
}

std::vector<std::unique_lock<RwLock>> Table::Impl::lock_all() const {
  std::vector<std::unique_lock<RwLock>> guards;
  guards.reserve(kShards);
  for (const auto& shard : shards) guards.emplace_back(shard->lock);
  return guards;
}

void Table::Impl::lookup_locked(const LookupPlan& plan, std::span<const std::int64_t> ids, float* out) const {
  const std::size_t dim = layout.dim;
  std::vector<float> scratch((kGroup + 1) * dim);
  float* const rows = scratch.data() + dim;
  LookupPlan plan_of_rows = plan;
  plan_of_rows.out_stride = dim;
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  const auto read = [&](const Shard& shard, std::size_t first, std::size_t last) {
    {
      const std::shared_lock guard(shard.lock);
      kernels->lookup(plan_of_rows, batch.ids.data() + first, nullptr, last - first, Pooling::kSum, rows, scratch.data());
    }
    for (std::size_t i = first; i < last; ++i) {
      std::memcpy(out + batch.tags[i] * plan.out_stride, rows + (i - first) * dim, dim * sizeof(float));
    }
  };
  // From the last shard to the first, against the way of the writers: a reader that goes their way catches up with one and then
  // waits for it at every shard.
  for (std::uint32_t s = kShards; s-- > 0;) for_each_group_of(s, batch, read);
}

void Table::Impl::lookup(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits, Pooling pooling, float* out,
                         std::size_t stride) const {
  std::vector<float> scratch(plans.size() + layout.dim);
  float* const scales = scratch.data();
  for (std::size_t s = 0; s < plans.size(); ++s) scales[s] = hashnet_scale(s);
  const bool rows_are_updated = lookups_since_update.fetch_add(1, std::memory_order_relaxed) < kLookupsBesideUpdates;
  LookupPlan plan{views.data(), region.addresses(), plans.data(), plans.size(), scales, table_key, layout.dim, stride,
                  lines(layout.weight_bytes), config.unseen_reads_zeros, rows_are_updated};
  const std::size_t bags = row_splits.empty() ? ids.size() : row_splits.size() - 1;
  {
    const WriteGate::Reading reading(gate);
    if (reading.open()) {
      kernels->lookup(plan, ids.data(), row_splits.empty() ? nullptr : row_splits.data(), bags, pooling, out,
                      scales + plans.size());
      return;
    }
  }
  if (row_splits.empty()) return lookup_locked(plan, ids, out);
  // Rows first, sums after, so that the order of additions and with it every bit is the same as without writers.
  const auto rows = std::make_unique_for_overwrite<float[]>(ids.size() * layout.dim);
  plan.out_stride = layout.dim;
  lookup_locked(plan, ids, rows.get());
  const float* row = rows.get();
  for (std::size_t bag = 0; bag < bags; ++bag, out += stride) {
    const std::int64_t n = row_splits[bag + 1] - row_splits[bag];
    std::fill_n(out, layout.dim, n == 0 ? 0.0f : -0.0f);
    for (std::int64_t i = 0; i < n; ++i, row += layout.dim) kernels->add(out, out, row, layout.dim);
    kernels->scale(out, pooling_factor(pooling, n), layout.dim);
  }
}

bool Table::has_admission() const noexcept { return impl_->admission != nullptr; }

Table::Table(TableConfig config, std::shared_ptr<AdmissionFilter> admission)
    : impl_(std::make_unique<Impl>(std::move(config), std::move(admission))) {}

Table::~Table() = default;

const TableConfig& Table::config() const noexcept { return impl_->config; }

std::uint32_t Table::dim() const noexcept { return impl_->layout.dim; }

std::uint32_t Table::row_bytes() const noexcept { return impl_->layout.row_bytes; }

std::string Table::layout() const { return impl_->layout.describe(); }

std::vector<SlotInfo> Table::slot_infos() const {
  std::vector<SlotInfo> infos;
  for (std::size_t s = 0; s < impl_->layout.segments.size(); ++s) {
    for (const Slot& slot : impl_->layout.segments[s].slots) {
      infos.push_back({std::to_string(s) + "/" + slot.name, slot.width, slot.is_int64});
    }
  }
  return infos;
}

void Table::lookup(std::span<const std::int64_t> ids, float* out) const {
  const TableRead read{this, ids, {}, Pooling::kSum, out, dim()};
  lookup_many({&read, 1});
}

void Table::lookup_pooled(std::span<const std::int64_t> ids, std::span<const std::int64_t> row_splits, Pooling pooling,
                          float* out) const {
  check_row_splits(row_splits, ids.size());
  const TableRead read{this, ids, row_splits, pooling, out, dim()};
  if (row_splits.size() > 1) lookup_many({&read, 1});
}

namespace {

// Bags of a read that one task reads.
struct Piece {
  const TableRead* read;
  std::size_t first, last;
};

std::size_t bags_of(const TableRead& read) noexcept {
  return read.offsets.empty() ? read.ids.size() : read.offsets.size() - 1;
}

// Calls f(piece) for each part of a read, in order.
template <typename F>
void for_each_piece(const TableRead& read, F&& f) {
  const std::size_t bags = bags_of(read);
  const std::size_t wanted = std::max(tasks_for(read.ids.size()), (read.ids.size() + kLookupPiece - 1) / kLookupPiece);
  const std::size_t pieces = std::min(wanted, bags);
  for (std::size_t piece = 0; piece < pieces; ++piece) f(Piece{&read, bags * piece / pieces, bags * (piece + 1) / pieces});
}

}  // namespace

void lookup_many(std::span<const TableRead> reads) {
  std::size_t total = 0;
  for (const TableRead& read : reads) {
    total += read.ids.size();
    if (read.offsets.empty()) continue;
    about_table(*read.table, [&] { check_row_splits(read.offsets, read.ids.size(), read.offsets.front()); });
  }
  const auto run = [](const Piece& piece) {
    const TableRead& read = *piece.read;
    const std::size_t bags = piece.last - piece.first;
    float* const out = read.out + piece.first * read.stride;
    if (read.offsets.empty()) {
      return read.table->impl_->lookup(read.ids.subspan(piece.first, bags), {}, read.pooling, out, read.stride);
    }
    const auto splits = read.offsets.subspan(piece.first, bags + 1);
    const auto first = static_cast<std::size_t>(splits.front() - read.offsets.front());
    const auto ids = read.ids.subspan(first, static_cast<std::size_t>(splits.back() - splits.front()));
    read.table->impl_->lookup(ids, splits, read.pooling, out, read.stride);
  };
  if (total < kIdsPerThread || num_threads() == 1) {
    for (std::size_t i = 0; i < reads.size(); ++i) {
      if (i + 1 < reads.size()) reads[i + 1].table->impl_->fetch_views();
      for_each_piece(reads[i], run);
    }
    return;
  }
  std::vector<Piece> pieces;
  pieces.reserve(reads.size());
  for (const TableRead& read : reads) for_each_piece(read, [&](const Piece& piece) { pieces.push_back(piece); });
  parallel_for(pieces.size(), [&](std::size_t i) {
    // Perhaps another thread takes that one: they share a cache.
    if (i + 1 < pieces.size()) pieces[i + 1].read->table->impl_->fetch_views();
    run(pieces[i]);
  });
}

void Table::contains(std::span<const std::int64_t> ids, bool* found) const {
  check_batch_size(ids.size());
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl_->for_each_group(batch, [&](const Shard& shard, std::size_t first, std::size_t last) {
    const std::shared_lock guard(shard.lock);
    for (std::size_t i = first; i < last; ++i) {
      found[batch.tags[i]] = static_cast<bool>(shard.index.find(batch.ids[i], hash_id(batch.ids[i])));
    }
  });
}

void Table::copy_rows(std::span<const std::int64_t> ids, bool* found, RowBatch& out) const {
  check_batch_size(ids.size());
  const Impl& impl = *impl_;
  const std::size_t row_bytes = impl.layout.row_bytes;
  out.ids.assign(ids.begin(), ids.end());
  out.times.assign(ids.size(), 0);
  out.rows.assign(ids.size() * row_bytes, std::byte{0});
  Partition& batch = Partition::of_this_thread();
  batch.build(ids, {});
  impl.for_each_group(batch, [&](const Shard& shard, std::size_t first, std::size_t last) {
    const std::shared_lock guard(shard.lock);
    impl.fetch_group(shard, batch.group(first, last));
    for (std::size_t i = first; i < last; ++i) {
      const std::uint32_t to = batch.tags[i];
      const auto slot = shard.index.find(batch.ids[i], hash_id(batch.ids[i]));
      found[to] = static_cast<bool>(slot);
      if (!slot) continue;
      out.times[to] = slot.time();
      std::memcpy(out.rows.data() + to * row_bytes, shard.rows.at(slot.row()), row_bytes);
    }
  });
}

Cursor Cursor::at(std::uint64_t hash) noexcept { return {shard_of(hash), position_of(hash)}; }

bool Table::scan(Cursor& cursor, RowBatch& batch) const {
  const Impl& impl = *impl_;
  const std::size_t row_bytes = impl.layout.row_bytes;
  if (cursor.shard >= kShards) return false;
  const Shard& shard = *impl.shards[cursor.shard];
  {
    const std::shared_lock guard(shard.lock);
    // Two passes: the first finds the rows and starts fetching them, the second copies.
    const std::size_t before = batch.ids.size();
    std::vector<const std::byte*> rows;
    cursor.position = shard.index.scan_block(cursor.position, [&](std::int64_t id, std::uint64_t, ShardIndex::Slot slot) {
      batch.ids.push_back(id);
      batch.times.push_back(slot.time());
      rows.push_back(shard.rows.at(slot.row()));
    });
    batch.rows.resize((before + rows.size()) * row_bytes);
    std::byte* to = batch.rows.data() + before * row_bytes;
    for (std::size_t i = 0; i < rows.size(); ++i, to += row_bytes) {
      if (i + 16 < rows.size()) fetch_lines(rows[i + 16], impl.lines(impl.layout.row_bytes));
      std::memcpy(to, rows[i], row_bytes);
    }
  }
  if (cursor.position == 0) ++cursor.shard;
  return true;
}

void Table::decode(std::span<const std::byte> rows, const EntryArrays& out) const {
  const Impl& impl = *impl_;
  const std::size_t n = rows.size() / impl.layout.row_bytes;
  for (std::size_t i = 0; i < n; ++i) {
    const std::byte* const row = rows.data() + i * impl.layout.row_bytes;
    std::size_t array = 0;
    for (std::size_t s = 0; s < impl.plans.size(); ++s) {
      impl.kernels->load(impl.plans[s], row, out.values + i * impl.layout.dim + impl.plans[s].value_offset);
      for (const Slot& slot : impl.layout.segments[s].slots) {
        const std::size_t bytes = slot.width * (slot.is_int64 ? sizeof(std::int64_t) : sizeof(float));
        std::memcpy(static_cast<std::byte*>(out.slots[array++]) + i * bytes, row + slot.offset, bytes);
      }
    }
  }
}

void Table::encode(std::size_t n, const EntryViews& entries, std::span<std::byte> rows) const {
  const Impl& impl = *impl_;
  if (rows.size() != n * impl.layout.row_bytes) throw InvalidArgument("encode: entries and rows disagree in length");
  std::fill(rows.begin(), rows.end(), std::byte{0});  // gaps between segments are zeros
  for (std::size_t i = 0; i < n; ++i) {
    std::byte* const row = rows.data() + i * impl.layout.row_bytes;
    std::size_t array = 0;
    for (std::size_t s = 0; s < impl.plans.size(); ++s) {
      impl.kernels->store(impl.plans[s], entries.values + i * impl.layout.dim + impl.plans[s].value_offset, row);
      for (const Slot& slot : impl.layout.segments[s].slots) {
        const std::size_t bytes = slot.width * (slot.is_int64 ? sizeof(std::int64_t) : sizeof(float));
        std::memcpy(row + slot.offset, static_cast<const std::byte*>(entries.slots[array++]) + i * bytes, bytes);
      }
    }
  }
}

bool Table::expired(std::int64_t id, std::uint32_t time, std::uint32_t now) const noexcept {
  const std::size_t slot = (static_cast<std::uint64_t>(id) >> 48) & (SlotThresholds::kSlots - 1);
  const std::uint64_t limit = impl_->slot_expiry.empty() ? impl_->config.default_expiry_seconds : impl_->slot_expiry[slot];
  return now >= time && now - time >= limit;
}

std::uint64_t Table::size() const noexcept {
  std::uint64_t rows = 0;
  for (const auto& shard : impl_->shards) rows += shard->index.size();
  return rows;
}

std::uint32_t Table::max_event_time() const noexcept { return impl_->max_event_time.load(std::memory_order_relaxed); }

TableStats Table::stats() const {
  TableStats stats;
  stats.row_bytes = impl_->layout.row_bytes;
  stats.max_event_time = max_event_time();
  stats.bytes = sizeof(Impl) + impl_->region.bytes() + impl_->blocks.bytes() + kShards * sizeof(Shard) + impl_->saved_rooms.bytes();
  for (const auto& shard : impl_->shards) {
    const std::shared_lock guard(shard->lock);
    stats.rows += shard->index.size();
    stats.index_slots += shard->index.slots();
    stats.growths += shard->index.growths();
    stats.bytes += shard->index.directory_bytes();
    if (shard->changes != nullptr) stats.bytes += shard->changes->bytes();
    if (shard->feed != nullptr) stats.bytes += shard->feed->bytes();
    if (shard == impl_->shards.front() && impl_->tracks()) stats.bytes += impl_->change_bits->bytes();
    if (shard == impl_->shards.front() && impl_->feeds()) stats.bytes += impl_->feed_bits->bytes();
  }
  return stats;
}

Table::State Table::state() const {
  State state{max_event_time(), impl_->updates.load(std::memory_order_relaxed), {}};
  for (std::size_t i = 0; i < impl_->plans.size(); ++i) state.hashnet_scales.push_back(impl_->hashnet_scale(i));
  return state;
}

void Table::reconfigure(const TableConfig& config, std::shared_ptr<AdmissionFilter> admission) {
  impl_->reconfigure(config, std::move(admission));
}

void Table::set_state(const State& state) {
  const std::vector<float>& scales = state.hashnet_scales;
  if (scales.size() != impl_->plans.size()) {
    throw InvalidArgument("hashnet_scales: expected " + std::to_string(impl_->plans.size()) + ", one per segment, got " +
                          std::to_string(scales.size()));
  }
  for (const float scale : scales) {
    if (!(scale >= 0) || !std::isfinite(scale)) {
      throw InvalidArgument("hashnet_scales: expected finite numbers >= 0, got " + std::to_string(scale));
    }
  }
  for (std::size_t i = 0; i < scales.size(); ++i) impl_->hashnet_scales[i].store(scales[i], std::memory_order_relaxed);
  impl_->note_event_time(state.max_event_time);
  impl_->updates.store(state.updates, std::memory_order_relaxed);
}

}  // namespace monolith
