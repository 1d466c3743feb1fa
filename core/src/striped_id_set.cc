#include "striped_id_set.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <utility>
#include <vector>

namespace monolith {

// One cache-line pair per stripe: neighbours are locked by different threads.
struct alignas(128) StripedIdSet::Stripe {
  std::mutex mutex;
  IdSet ids;
};

StripedIdSet::StripedIdSet(std::uint32_t stripes, const StripedIdSet* like)
    : stripes_(stripes), stripe_bits_(std::countr_zero(stripes)), table_(std::make_unique<Stripe[]>(stripes)) {
  if (like == nullptr) return;
  for (std::uint32_t i = 0; i < stripes; ++i) table_[i].ids = IdSet(like->table_[i].ids.size());
}

StripedIdSet::~StripedIdSet() = default;

StripedIdSet::Stripe& StripedIdSet::stripe_of(std::uint64_t hash) const noexcept {
  // Two shifts because shifting by 64, for a single stripe, is undefined.
  return table_[(hash >> 1) >> (63 - stripe_bits_)];
}

bool StripedIdSet::insert_alone(std::int64_t id) {
  const std::uint64_t hash = hash_id(id);
  const bool fresh = stripe_of(hash).ids.insert(id, hash);
  size_.fetch_add(fresh, std::memory_order_relaxed);
  return fresh;
}

void StripedIdSet::insert_one_by_one(std::span<const std::int64_t> ids, std::size_t& fresh) {
  for (const std::int64_t id : ids) {
    const std::uint64_t hash = hash_id(id);
    Stripe& stripe = stripe_of(hash);
    const std::lock_guard<std::mutex> lock(stripe.mutex);
    if (!stripe.ids.insert(id, hash)) continue;
    ++fresh;
    size_.fetch_add(1, std::memory_order_relaxed);
  }
}

void StripedIdSet::insert_into(Stripe& stripe, std::span<const std::int64_t> ids, std::size_t& fresh) {
  constexpr std::size_t kAhead = 8;
  const std::lock_guard<std::mutex> lock(stripe.mutex);
  const std::size_t before = stripe.ids.size();
  // Counted when the scope ends, so that ids added before a failed allocation are counted too.
  struct Count {
    StripedIdSet& set;
    const IdSet& ids;
    std::size_t before;
    std::size_t& fresh;
    ~Count() {
      fresh += ids.size() - before;
      set.size_.fetch_add(ids.size() - before, std::memory_order_relaxed);
    }
  } const count{*this, stripe.ids, before, fresh};
  for (std::size_t i = 0; i < std::min(kAhead, ids.size()); ++i) stripe.ids.prefetch(hash_id(ids[i]));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) stripe.ids.prefetch(hash_id(ids[i + kAhead]));
    stripe.ids.insert(ids[i], hash_id(ids[i]));
  }
}

void StripedIdSet::insert(std::span<const std::int64_t> ids, std::size_t& fresh) {
  // Grouping visits every stripe; it pays only when a stripe gets several ids.
  if (ids.size() < 2 * std::size_t{stripes_}) return insert_one_by_one(ids, fresh);
  if (stripes_ == 1) return insert_into(table_[0], ids, fresh);

  const auto grouped = std::make_unique_for_overwrite<std::int64_t[]>(std::min(ids.size(), kChunk));
  std::vector<std::uint32_t> ends(stripes_);
  while (!ids.empty()) {
    const auto chunk = ids.first(std::min(ids.size(), kChunk));
    ids = ids.subspan(chunk.size());
    std::fill(ends.begin(), ends.end(), 0u);
    for (const std::int64_t id : chunk) ++ends[&stripe_of(hash_id(id)) - table_.get()];
    std::uint32_t total = 0;
    for (std::uint32_t& end : ends) total += std::exchange(end, total);
    for (const std::int64_t id : chunk) grouped[ends[&stripe_of(hash_id(id)) - table_.get()]++] = id;
    std::uint32_t begin = 0;
    for (std::uint32_t i = 0; i < stripes_; begin = ends[i++]) {
      if (begin != ends[i]) insert_into(table_[i], {grouped.get() + begin, ends[i] - begin}, fresh);
    }
  }
}

void StripedIdSet::clear() noexcept {
  for (std::uint32_t i = 0; i < stripes_; ++i) table_[i].ids.clear();
  size_.store(0, std::memory_order_relaxed);
}

void StripedIdSet::copy_to(std::int64_t* out) const noexcept {
  for (std::uint32_t i = 0; i < stripes_; ++i) out = table_[i].ids.copy_to(out);
}

std::size_t StripedIdSet::bytes() const noexcept {
  std::size_t total = stripes_ * sizeof(Stripe);
  for (std::uint32_t i = 0; i < stripes_; ++i) total += table_[i].ids.bytes();
  return total;
}

}  // namespace monolith
