// Reads: finds the row of every id and sums the rows of every bag, in call order. Included only by kernels.cc.
//
// Almost all of the time goes into waiting for two cache lines per id, one of the index and one of the row. So ids go through stages in
// groups, several groups are under way at once, each a stage behind the one before it, and no stage waits for memory.
#pragma once

#include "fetch.h"
#include "kernels/kernels.h"
#include "shard_view.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

// Ids of one stage before the next stage has its turn: bucket, row, row of an id that was not in its first bucket, use.
constexpr std::size_t kTurn = 64;
static_assert((kTurn & (kTurn - 1)) == 0);

template <bool kNear>
class RowWindow {
 public:
  RowWindow(const LookupPlan& plan, const std::int64_t* ids, std::size_t n) : plan_(plan), ids_(ids), n_(n) {
    fetch_buckets(0);
    fetch_buckets(kTurn);
    fetch_rows(0);
    fetch_buckets(2 * kTurn);
    fetch_displaced_rows(0);
    fetch_rows(kTurn);
  }

  // The row of ids[i], or null. To be called once for each i from 0 on.
  [[gnu::always_inline]] const std::byte* next(std::size_t i) {
    if (i % kTurn == 0) advance(i);
    return rows_[i % kWindow];
  }

 private:
  static constexpr std::size_t kWindow = 4 * kTurn;

  // Not inlined: it would take the registers of the loop that sums.
  [[gnu::noinline]] void advance(std::size_t i) {
    fetch_displaced_rows(i + kTurn);
    fetch_rows(i + 2 * kTurn);
    fetch_buckets(i + 3 * kTurn);
  }

  [[gnu::always_inline]] std::size_t size_of_turn(std::size_t first) const {
    return first + kTurn <= n_ ? kTurn : first < n_ ? n_ - first : 0;
  }

  [[gnu::always_inline]] void fetch_buckets(std::size_t first) {
    const std::size_t n = size_of_turn(first);
    const std::int64_t* const ids = ids_ + first;
    const Bucket** const buckets = buckets_ + first % (2 * kTurn);
    const ShardView* const shards = plan_.shards;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t hash = hash_id(ids[i]);
      buckets[i] = shards[shard_of(hash)].home(hash);
      fetch_line(buckets[i]);
    }
  }

  // Whether the id is in its first bucket cannot be predicted, and a wrongly predicted branch would throw away what is under way
  // behind it: so no branch here, only a list of those that are not.
  [[gnu::always_inline]] void fetch_rows(std::size_t first) {
    const std::size_t n = size_of_turn(first);
    const std::int64_t* const ids = ids_ + first;
    const Bucket* const* const buckets = buckets_ + first % (2 * kTurn);
    const std::byte** const rows = rows_ + first % kWindow;
    const RowAddresses addresses = plan_.rows;
    std::size_t displaced = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint32_t number = buckets[i]->match(ids[i]).row;
      const std::byte* const row = addresses.at(number);
      rows[i] = row;
      displaced_[displaced] = static_cast<std::uint32_t>(i);
      displaced += number == 0;
      fetch_weights(row);
    }
    // Their search goes on in the next bucket.
    for (std::size_t i = 0; i < displaced; ++i) fetch_line(buckets[displaced_[i]] + 1);
    num_displaced_ = displaced;
  }

  // Those of the turn that fetch_rows() looked at last.
  [[gnu::always_inline]] void fetch_displaced_rows(std::size_t first) {
    for (std::size_t i = 0; i < num_displaced_; ++i) {
      const std::size_t at = first + displaced_[i];
      const std::uint64_t hash = hash_id(ids_[at]);
      const BucketSlot found = plan_.shards[shard_of(hash)].find(ids_[at], hash);
      const std::byte* const row = found ? plan_.rows.at(found.row()) : nullptr;
      rows_[at % kWindow] = row;
      fetch_weights(row);
    }
  }

  [[gnu::always_inline]] void fetch_weights(const std::byte* row) const {
    fetch_line(row);
    for (std::uint32_t line = 1; line < plan_.weight_lines; ++line) fetch_line(row + line * 64);
  }
  [[gnu::always_inline]] static void fetch_line(const void* line) { kNear ? fetch_near(line) : fetch(line); }

  const LookupPlan& plan_;
  const std::int64_t* ids_;
  std::size_t n_;
  const Bucket* buckets_[2 * kTurn];
  const std::byte* rows_[kWindow];
  std::uint32_t displaced_[kTurn + 1];  // positions in their turn; one more is always written, and counts if it is one
  std::size_t num_displaced_ = 0;
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
template <std::uint32_t kDim, bool kNear>
void lookup_plain(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags,
                  Pooling pooling, float* out, float* scratch) {
  constexpr std::uint32_t kVectors = kDim / 8, kRest = kDim % 8;
  const std::int64_t base = row_splits == nullptr ? 0 : row_splits[0];
  const std::size_t n = row_splits == nullptr ? bags : static_cast<std::size_t>(row_splits[bags] - base);
  RowWindow<kNear> window(plan, ids, n);
  std::size_t i = 0;
  for (std::size_t bag = 0; bag < bags; ++bag, out += plan.out_stride) {
    const std::size_t first = i;
    const std::size_t last = row_splits == nullptr ? bag + 1 : static_cast<std::size_t>(row_splits[bag + 1] - base);
    // Adding to -0 changes nothing, not even the sign of a zero: a bag of one is its row, bit for bit.
    const float zero = last > first ? -0.0f : 0.0f;
    Vector sum[kVectors + 1];
    float rest[kRest + 1];
    for (std::uint32_t v = 0; v <= kVectors; ++v) sum[v] = zero - Vector{};
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

template <bool kNear>
void lookup_any(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags,
                Pooling pooling, float* out, float* scratch) {
  const std::int64_t base = row_splits == nullptr ? 0 : row_splits[0];
  const std::size_t n = row_splits == nullptr ? bags : static_cast<std::size_t>(row_splits[bags] - base);
  RowWindow<kNear> window(plan, ids, n);
  std::size_t i = 0;
  for (std::size_t bag = 0; bag < bags; ++bag, out += plan.out_stride) {
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

template <bool kNear>
void lookup_rows(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags, Pooling pooling,
                 float* out, float* scratch) {
  auto run = lookup_any<kNear>;
  bool plain = true;
  for (std::size_t s = 0; s < plan.num_segments; ++s) plain &= is_plain(plan.segments[s]);
  if (plain) {
    switch (plan.dim) {
      case 1: run = lookup_plain<1, kNear>; break;
      case 4: run = lookup_plain<4, kNear>; break;
      case 8: run = lookup_plain<8, kNear>; break;
      case 16: run = lookup_plain<16, kNear>; break;
      case 32: run = lookup_plain<32, kNear>; break;
      case 64: run = lookup_plain<64, kNear>; break;
      // A bias beside the vector.
      case 9: run = lookup_plain<9, kNear>; break;
      case 17: run = lookup_plain<17, kNear>; break;
      case 33: run = lookup_plain<33, kNear>; break;
      case 65: run = lookup_plain<65, kNear>; break;
      default: break;
    }
  }
  run(plan, ids, row_splits, bags, pooling, out, scratch);
}

void lookup(const LookupPlan& plan, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags, Pooling pooling,
            float* out, float* scratch) {
  const auto run = plan.rows_are_updated ? lookup_rows<false> : lookup_rows<true>;
  run(plan, ids, row_splits, bags, pooling, out, scratch);
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
