// Reads: finds the row of every id and sums the rows of every bag, in call order. Included only by kernels.cc.
//
// Almost all of the time goes into waiting for two cache lines per id, one of the index and one of the row, and for the two small
// tables that say where those are: the directory of a shard, and its chunks. Those are too large for the inner caches when ids come
// in any order. So a window of ids is under way at once, each a stage behind the one before it, and no stage waits for memory.
#pragma once

#include "fetch.h"
#include "kernels/kernels.h"
#include "shard_view.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

// Ids between the stages: directory entry, bucket, chunk, row, row of an id that was not in its first bucket, use.
constexpr std::size_t kStage = 12;
constexpr std::size_t kWindow = 64;
static_assert(kWindow > 5 * kStage && (kWindow & (kWindow - 1)) == 0);

class RowWindow {
 public:
  RowWindow(const LookupPlan& plan, const std::int64_t* ids, std::size_t n) : plan_(plan), ids_(ids), n_(n) {
    for (std::size_t i = 0; i < 5 * kStage && i < n; ++i) fetch_entry(i);
    for (std::size_t i = 0; i < 4 * kStage && i < n; ++i) fetch_bucket(i);
    for (std::size_t i = 0; i < 3 * kStage && i < n; ++i) fetch_chunk(i);
    for (std::size_t i = 0; i < 2 * kStage && i < n; ++i) fetch_row(i);
    for (std::size_t i = 0; i < kStage && i < n; ++i) fetch_displaced_row(i);
  }

  // The row of ids[i], or null. To be called once for each i from 0 on.
  [[gnu::always_inline]] const std::byte* next(std::size_t i) {
    const std::byte* const row = under_way_[i % kWindow].row;
    if (i + 5 * kStage < n_) [[likely]] {
      fetch_entry(i + 5 * kStage);
      fetch_bucket(i + 4 * kStage);
      fetch_chunk(i + 3 * kStage);
      fetch_row(i + 2 * kStage);
      fetch_displaced_row(i + kStage);
    } else {
      if (i + 4 * kStage < n_) fetch_bucket(i + 4 * kStage);
      if (i + 3 * kStage < n_) fetch_chunk(i + 3 * kStage);
      if (i + 2 * kStage < n_) fetch_row(i + 2 * kStage);
      if (i + kStage < n_) fetch_displaced_row(i + kStage);
    }
    return row;
  }

 private:
  // What the last stage of an id has left for its next. What is fetched and not needed any more makes room for what follows.
  struct UnderWay {
    const ShardView* shard;
    std::uint64_t hash;
    union {
      const std::uintptr_t* entry;
      const Bucket* bucket;
      std::byte* const* chunk;
      const std::byte* row;
    };
    std::uint32_t offset;  // of the row in its chunk
    bool here;             // in its first bucket
  };

  [[gnu::always_inline]] void fetch_entry(std::size_t i) {
    UnderWay& id = under_way_[i % kWindow];
    id.hash = hash_id(ids_[i]);
    id.shard = &plan_.shards[shard_of(id.hash)];
    id.entry = id.shard->place(id.hash);
    fetch(id.entry);
  }

  [[gnu::always_inline]] void fetch_bucket(std::size_t i) {
    UnderWay& id = under_way_[i % kWindow];
    id.bucket = ShardView::bucket(*id.entry, id.hash);
    fetch(id.bucket);
  }

  // Whether the id is in its first bucket cannot be predicted, and a wrongly predicted branch would throw away the fetches under
  // way behind it: so no branch here, only a guess to be looked at two stages later.
  [[gnu::always_inline]] void fetch_chunk(std::size_t i) {
    UnderWay& id = under_way_[i % kWindow];
    const Bucket* const bucket = id.bucket;
    const Bucket::Guess guess = bucket->guess(ids_[i]);
    const RowPlace place = RowPlace::of(bucket->rows[guess.slot]);
    id.chunk = id.shard->chunks + place.chunk;
    id.offset = static_cast<std::uint32_t>(place.offset);
    id.here = guess.right;
    fetch(guess.right ? static_cast<const void*>(id.chunk) : static_cast<const void*>(bucket + 1));
  }

  [[gnu::always_inline]] void fetch_row(std::size_t i) {
    UnderWay& id = under_way_[i % kWindow];
    id.row = *id.chunk + std::uint64_t{id.offset} * plan_.row_bytes;
    fetch_lines(id.row, plan_.weight_lines);
  }

  [[gnu::always_inline]] void fetch_displaced_row(std::size_t i) {
    UnderWay& id = under_way_[i % kWindow];
    if (id.here) [[likely]] return;
    const BucketSlot found = id.shard->find(ids_[i], id.hash);
    id.row = found ? id.shard->row(found.row(), plan_.row_bytes) : nullptr;
    fetch_lines(id.row, plan_.weight_lines);
  }

  const LookupPlan& plan_;
  const std::int64_t* ids_;
  std::size_t n_;
  UnderWay under_way_[kWindow];
};

// Segments of any kind: decoded one after the other.
void read_row(const LookupPlan& plan, const std::byte* row, std::int64_t id, float* value) {
  if (row == nullptr && plan.unseen_reads_zeros) {
    __builtin_memset(value, 0, plan.dim * sizeof(float));
    return;
  }
  const std::uint64_t key = hash_id(static_cast<std::int64_t>(hash_id(id) ^ plan.table_key));
  for (std::size_t s = 0; s < plan.num_segments; ++s) {
    const SegmentPlan& segment = plan.segments[s];
    float* const to = value + segment.value_offset;
    if (row == nullptr) {
      initial_value(segment, plan.hashnet_scales[s], key, to);
    } else {
      load(segment, row, to);
      apply_read_path(segment, plan.hashnet_scales[s], to);
    }
  }
}

// Segments of plain floats, kDim in all: their weights lie behind each other, and a bag's sum stays in registers.
template <std::uint32_t kDim>
void lookup_plain(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags,
                  Pooling pooling, float* out, float* scratch) {
  constexpr std::uint32_t kVectors = kDim / 8, kRest = kDim % 8;
  const std::int64_t base = row_splits == nullptr ? 0 : row_splits[0];
  const std::size_t n = row_splits == nullptr ? bags : static_cast<std::size_t>(row_splits[bags] - base);
  RowWindow window(plan, ids, n);
  std::size_t i = 0;
  for (std::size_t bag = 0; bag < bags; ++bag, out += kDim) {
    const std::size_t first = i;
    const std::size_t last = row_splits == nullptr ? bag + 1 : static_cast<std::size_t>(row_splits[bag + 1] - base);
    // Adding to -0 changes nothing, not even the sign of a zero: a bag of one is its row, bit for bit.
    const float zero = last > first ? -0.0f : 0.0f;
    Vector sum[kVectors + 1];
    float rest[kRest + 1];
    for (Vector& part : sum) part = zero - Vector{};
    for (float& part : rest) part = zero;
    for (; i < last; ++i) {
      const float* weights = reinterpret_cast<const float*>(window.next(i));
      if (weights == nullptr) {
        read_row(plan, nullptr, ids[i], scratch);
        weights = scratch;
      }
      for (std::uint32_t v = 0; v < kVectors; ++v) sum[v] += *reinterpret_cast<const Vector*>(weights + v * 8);
      for (std::uint32_t r = 0; r < kRest; ++r) rest[r] += weights[kVectors * 8 + r];
    }
    if (pooling != Pooling::kSum) {
      const float factor = pooling_factor(pooling, static_cast<std::int64_t>(last - first));
      for (std::uint32_t v = 0; v < kVectors; ++v) sum[v] *= factor;
      for (std::uint32_t r = 0; r < kRest; ++r) rest[r] *= factor;
    }
    for (std::uint32_t v = 0; v < kVectors; ++v) *reinterpret_cast<Vector*>(out + v * 8) = sum[v];
    for (std::uint32_t r = 0; r < kRest; ++r) out[kVectors * 8 + r] = rest[r];
  }
}

void lookup_any(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags,
                Pooling pooling, float* out, float* scratch) {
  const std::int64_t base = row_splits == nullptr ? 0 : row_splits[0];
  const std::size_t n = row_splits == nullptr ? bags : static_cast<std::size_t>(row_splits[bags] - base);
  RowWindow window(plan, ids, n);
  std::size_t i = 0;
  for (std::size_t bag = 0; bag < bags; ++bag, out += plan.dim) {
    const std::size_t first = i;
    const std::size_t last = row_splits == nullptr ? bag + 1 : static_cast<std::size_t>(row_splits[bag + 1] - base);
    if (i == last) __builtin_memset(out, 0, plan.dim * sizeof(float));
    for (; i < last; ++i) {
      read_row(plan, window.next(i), ids[i], i == first ? out : scratch);
      if (i != first) add(out, out, scratch, plan.dim);
    }
    if (pooling != Pooling::kSum) {
      scale(out, pooling_factor(pooling, static_cast<std::int64_t>(last - first)), plan.dim);
    }
  }
}

void lookup(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags, Pooling pooling,
            float* out, float* scratch) {
  auto run = lookup_any;
  bool plain = true;
  for (std::size_t s = 0; s < plan.num_segments; ++s) plain &= is_plain(plan.segments[s]);
  if (plain) {
    switch (plan.dim) {
      case 1: run = lookup_plain<1>; break;
      case 4: run = lookup_plain<4>; break;
      case 8: run = lookup_plain<8>; break;
      case 16: run = lookup_plain<16>; break;
      case 32: run = lookup_plain<32>; break;
      case 64: run = lookup_plain<64>; break;
      // A bias beside the vector.
      case 9: run = lookup_plain<9>; break;
      case 17: run = lookup_plain<17>; break;
      case 33: run = lookup_plain<33>; break;
      case 65: run = lookup_plain<65>; break;
      default: break;
    }
  }
  run(plan, ids, row_splits, bags, pooling, out, scratch);
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
