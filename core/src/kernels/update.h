// The stages of an update that look for rows (table_apply.cc). Included only by kernels.cc.
#pragma once

#include "fetch.h"
#include "kernels/kernels.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

void find_shards(const std::int64_t* ids, std::size_t n, std::uint8_t* shards) {
  for (std::size_t i = 0; i < n; ++i) shards[i] = static_cast<std::uint8_t>(shard_of(hash_id(ids[i])));
}

// Far more than any admission filter counts to.
constexpr std::uint32_t kMaxCount = kSummed - 1;

[[gnu::always_inline]] inline std::uint32_t add_counts(std::uint32_t a, std::uint32_t b) noexcept {
  return a + b < kMaxCount ? a + b : kMaxCount;
}

[[gnu::always_inline]] inline std::uint32_t count_of(const UpdatePlan& plan, std::uint32_t tag) noexcept {
  if (plan.counts == nullptr) return 1;
  return plan.counts[tag] < kMaxCount ? static_cast<std::uint32_t>(plan.counts[tag]) : kMaxCount;
}

[[gnu::always_inline]] inline const float* grad_of(const UpdatePlan& plan, std::uint32_t tag) noexcept {
  return plan.grad_rows == nullptr ? plan.grads + tag * plan.grad_stride : plan.grad_rows[tag];
}

// True if the id was there and the gradient has been added to its sum.
[[gnu::always_inline]] inline bool merge(UpdateUnit& unit, std::int64_t id, std::uint64_t hash, const float* grad, std::size_t dim,
                                         std::uint32_t count) {
  for (std::uint64_t place = (hash >> 32) & unit.place_mask;; place = (place + 1) & unit.place_mask) {
    if (unit.places[place] == 0) [[likely]] {
      unit.places[place] = static_cast<std::uint32_t>(unit.size + 1);
      return false;
    }
    const std::size_t at = unit.places[place] - 1;
    if (unit.ids[at] != id) continue;
    const float* const before = unit.grads[at];
    const std::uint32_t counted = unit.counts[at];
    float* const sum = (counted & kSummed) == 0 ? unit.sums + unit.num_sums++ * dim : const_cast<float*>(before);
    add(sum, before, grad, dim);
    unit.grads[at] = sum;
    unit.counts[at] = add_counts(counted & ~kSummed, count) | kSummed;
    return true;
  }
}

// kPlain: ids are to be summed, and nobody needs snapshots or rounding keys.
template <bool kPlain>
void collect_ids(const UpdatePlan& plan, UpdateUnit& unit, std::size_t last) {
  const std::size_t dim = plan.dim;
  const std::size_t first = unit.next;
  std::uint64_t hashes[kUpdateTurn];
  for (std::size_t i = first; i < last; ++i) hashes[i - first] = hash_id(plan.ids[i]);
  for (std::size_t i = first; i < last; ++i) fetch(grad_of(plan, plan.tags[i]));
  for (std::size_t i = first; i < last; ++i) {
    const std::int64_t id = plan.ids[i];
    const std::uint64_t hash = hashes[i - first];
    const float* const grad = grad_of(plan, plan.tags[i]);
    const std::uint32_t count = count_of(plan, plan.tags[i]);
    if ((kPlain || !plan.sequential) && merge(unit, id, hash, grad, dim, count)) continue;
    const std::size_t at = unit.size++;
    unit.ids[at] = id;
    unit.hashes[at] = hash;
    unit.buckets[at] = plan.shards[shard_of(hash)].home(hash);
    fetch(unit.buckets[at]);
    unit.counts[at] = count;
    unit.grads[at] = grad;
    if constexpr (!kPlain) {
      if (plan.snapshot != nullptr) unit.snapshots[at] = plan.snapshot + plan.tags[i] * dim;
      // Draws depend on the id and the number of the call, never on which thread ran or where in the call the id is, so that the
      // same data trains to the same bits, however it is spread over processes. Only an id that makes several steps in a call
      // needs its place too.
      const std::uint64_t id_key = hash_id(static_cast<std::int64_t>(hash ^ plan.table_key));
      const std::uint64_t place = plan.sequential ? i + 1 : 1;
      unit.rounding_keys[at] = id_key + ((std::uint64_t{plan.call} << 32) + place) * 0x9E3779B97F4A7C15ull;
    }
  }
  unit.next = last;
}

void collect(const UpdatePlan& plan, UpdateUnit& unit, std::size_t last) {
  const bool plain = !plan.sequential && plan.snapshot == nullptr && !plan.rounding_keys;
  plain ? collect_ids<true>(plan, unit, last) : collect_ids<false>(plan, unit, last);
}

template <bool kTracked>
void match_ids(const UpdatePlan& plan, UpdateUnit& unit, std::size_t last) {
  const RowAddresses addresses = plan.rows;
  const std::uint32_t event_time = plan.event_time;
  const std::size_t first = unit.matched;
  const std::int64_t* const ids = unit.ids;
  Bucket* const* const buckets = unit.buckets;
  std::byte** const rows = unit.rows;
  std::uint32_t* const unmatched = unit.unmatched + unit.num_unmatched;
  std::size_t num_unmatched = 0;
  for (std::size_t at = first; at < last; ++at) {
    Bucket* const bucket = buckets[at];
    // No branch on whether the id is in its first bucket: see lookup.h.
    const Bucket::Match match = bucket->match(ids[at]);
    const bool here = match.row != 0;
    rows[at] = addresses.at(match.row);
    unmatched[num_unmatched] = static_cast<std::uint32_t>(at);
    num_unmatched += !here;
    if constexpr (kTracked) {
      unit.matches[at] = match;
    } else if (here && bucket->times[match.slot] != event_time) {
      // Most batches carry the time that is there already; not writing keeps the cache line clean.
      bucket->times[match.slot] = event_time;
    }
  }
  for (std::size_t at = first; at < last; ++at) fetch_lines(rows[at], plan.row_lines);
  // An id that is not there ends its search in its first bucket, or if that is full mostly in the next.
  for (std::size_t i = 0; i < num_unmatched; ++i) fetch(buckets[unmatched[i]] + buckets[unmatched[i]]->full());
  unit.num_unmatched += num_unmatched;
  unit.matched = last;
}

void match(const UpdatePlan& plan, UpdateUnit& unit, std::size_t last) {
  unit.tracked ? match_ids<true>(plan, unit, last) : match_ids<false>(plan, unit, last);
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
