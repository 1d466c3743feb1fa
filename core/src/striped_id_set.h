// An id set cut into stripes by the high bits of the hash, each stripe with its own lock and its own growth. A batch is first
// grouped by stripe, so that a lock is taken once per stripe and not once per id, and the ids of a stripe stay in cache.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "id_set.h"

namespace monolith {

class StripedIdSet {
 public:
  // stripes: a power of two. like: stripe sizes to expect again, or null.
  explicit StripedIdSet(std::uint32_t stripes, const StripedIdSet* like = nullptr);
  ~StripedIdSet();

  // Thread safe. Adds to `fresh` the number of ids that were not in the set, also when std::bad_alloc stops it half way.
  void insert(std::span<const std::int64_t> ids, std::size_t& fresh);

  // Ids in the set; exact when no insert is running. Thread safe.
  std::size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

  // Not thread safe: the caller keeps everybody else out.
  bool insert_alone(std::int64_t id);
  void clear() noexcept;
  // Writes every id to out[0 .. size()); out[size()] may be overwritten too.
  void copy_to(std::int64_t* out) const noexcept;
  std::size_t bytes() const noexcept;

  // Ids of one insert call that are grouped at a time; the scratch memory of a call is 8 bytes for each of them.
  static constexpr std::size_t kChunk = 1u << 14;

 private:
  struct Stripe;
  Stripe& stripe_of(std::uint64_t hash) const noexcept;
  void insert_one_by_one(std::span<const std::int64_t> ids, std::size_t& fresh);
  void insert_into(Stripe& stripe, std::span<const std::int64_t> ids, std::size_t& fresh);

  const std::uint32_t stripes_;
  const std::uint32_t stripe_bits_;
  std::unique_ptr<Stripe[]> table_;
  std::atomic<std::size_t> size_{0};
};

}  // namespace monolith
