// Reads: finds the row of every id and sums the rows of every bag, in call order. Included only by kernels.cc.
//
// Almost all of the time goes into waiting for two cache lines per id, one of the index and one of the row. So a window of ids is
// under way at once: while an id is summed, the row of one further on and the bucket of one twice as far are being fetched.
#pragma once

#include "kernels/kernels.h"
#include "shard_view.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

// Ids between the stages: bucket, row, row of an id that was not in its first bucket, use.
constexpr std::size_t kStage = 14;
constexpr std::size_t kWindow = 64;
static_assert(kWindow > 3 * kStage && (kWindow & (kWindow - 1)) == 0);

class RowWindow {
 public:
  RowWindow(const LookupPlan& plan, const std::int64_t* ids, std::size_t n) : plan_(plan), ids_(ids), n_(n) {
    for (std::size_t i = 0; i < 3 * kStage && i < n; ++i) fetch_bucket(i);
    for (std::size_t i = 0; i < 2 * kStage && i < n; ++i) fetch_row(i);
    for (std::size_t i = 0; i < kStage && i < n; ++i) fetch_displaced_row(i);
  }

  // The row of ids[i], or null. To be called once for each i from 0 on.
  [[gnu::always_inline]] const std::byte* next(std::size_t i) {
    const std::byte* const row = rows_[i % kWindow];
    if (i + 3 * kStage < n_) [[likely]] {
      fetch_bucket(i + 3 * kStage);
      fetch_row(i + 2 * kStage);
      fetch_displaced_row(i + kStage);
    } else {
      if (i + 2 * kStage < n_) fetch_row(i + 2 * kStage);
      if (i + kStage < n_) fetch_displaced_row(i + kStage);
    }
    return row;
  }

 private:
  [[gnu::always_inline]] void fetch_bucket(std::size_t i) {
    const std::uint64_t hash = hash_id(ids_[i]);
    const ShardView& shard = plan_.shards[shard_of(hash)];
    const Bucket* const bucket = shard.home(hash);
    __builtin_prefetch(bucket);
    shards_[i % kWindow] = &shard;
    buckets_[i % kWindow] = bucket;
  }

  // Whether the id is in its first bucket cannot be predicted, and a wrongly predicted branch would throw away the fetches under
  // way behind it: so no branch here, only a guess to be looked at one stage later.
  [[gnu::always_inline]] void fetch_row(std::size_t i) {
    const Bucket* const bucket = buckets_[i % kWindow];
    const Bucket::Guess guess = bucket->guess(ids_[i]);
    const std::byte* const row = shards_[i % kWindow]->row(bucket->rows[guess.slot], plan_.row_bytes);
    fetch(guess.right ? row : reinterpret_cast<const std::byte*>(bucket + 1));
    rows_[i % kWindow] = row;
    here_[i % kWindow] = guess.right;
  }

  [[gnu::always_inline]] void fetch_displaced_row(std::size_t i) {
    if (here_[i % kWindow]) [[likely]] return;
    const BucketSlot found = shards_[i % kWindow]->find(ids_[i], hash_id(ids_[i]));
    const std::byte* const row = found ? shards_[i % kWindow]->row(found.row(), plan_.row_bytes) : nullptr;
    fetch(row);
    rows_[i % kWindow] = row;
  }

  [[gnu::always_inline]] void fetch(const std::byte* row) const {
    for (std::uint32_t line = 0; line < plan_.weight_lines; ++line) __builtin_prefetch(row + line * 64);
  }

  const LookupPlan& plan_;
  const std::int64_t* ids_;
  std::size_t n_;
  const ShardView* shards_[kWindow];
  const Bucket* buckets_[kWindow];
  const std::byte* rows_[kWindow];
  bool here_[kWindow];
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
