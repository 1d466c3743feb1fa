// Two sets that remember which ids were written since somebody last asked.
//
//   TouchedKeySet  the original's bounded set: when it holds more than `capacity` ids it forgets all of them and says how many.
//   ChangedIdSet   never forgets: an id leaves only when the caller confirms that its change is durable.
//
// Any int64 is a valid id. The order of stolen ids is unspecified.
//
// Thread-safety: every method of both classes may be called from any number of threads at once.
// Ownership: ids are copied in; stolen ids belong to the caller.
// Failure: std::bad_alloc from any call that stores or returns ids. insert: ids of the call may already be in the set, nothing
// that was in it before is lost, and inserting the same ids again is safe. steal: the set is unchanged.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

namespace monolith {

class StripedIdSet;
class Gate;

class TouchedKeySet {
 public:
  static constexpr std::int64_t kDefaultCapacity = 64 * 1024 * 1024 / (8 * 4);
  static constexpr std::int64_t kDefaultConcurrencyLevel = 1024;
  static constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 40;
  static constexpr std::int64_t kMaxConcurrencyLevel = 1 << 16;

  // capacity: ids, 1..kMaxCapacity. concurrency_level: inserting threads expected at once, 1..kMaxConcurrencyLevel; rounded up
  // to a power of two lock stripes. Throws InvalidArgument outside these ranges. Memory for ids is taken by inserts, not here.
  explicit TouchedKeySet(std::int64_t capacity = kDefaultCapacity,
                         std::int64_t concurrency_level = kDefaultConcurrencyLevel);
  ~TouchedKeySet();
  TouchedKeySet(const TouchedKeySet&) = delete;
  TouchedKeySet& operator=(const TouchedKeySet&) = delete;

  // Adds the ids in order and returns how many ids were dropped: for each id, if the set holds more than `capacity` ids when its
  // turn comes, the whole set is cleared first (also when the id is already in it). The set never holds more than capacity + 1
  // ids, however many threads insert.
  std::uint64_t insert(std::span<const std::int64_t> ids);

  // All ids, leaving the set empty. Inserting threads wait only for a constant time per stripe, not for the copying.
  std::vector<std::int64_t> steal();

  std::size_t size() const;
  std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint32_t stripes() const noexcept { return stripes_; }
  std::size_t bytes() const;

 private:
  bool insert_if_room(std::span<const std::int64_t> ids);
  std::uint64_t insert_alone(std::span<const std::int64_t> ids);

  const std::uint64_t capacity_;
  const std::uint32_t stripes_;
  std::unique_ptr<Gate> gate_;
  std::unique_ptr<StripedIdSet> ids_;
  // Ids in the set plus ids that running inserts may still add.
  std::atomic<std::uint64_t> reserved_{0};
};

class ChangedIdSet {
 public:
  // Ids handed out by steal(); stays valid for as long as the caller keeps it, whatever happens to the set.
  using Batch = std::shared_ptr<const std::vector<std::int64_t>>;

  ChangedIdSet();
  ~ChangedIdSet();
  ChangedIdSet(const ChangedIdSet&) = delete;
  ChangedIdSet& operator=(const ChangedIdSet&) = delete;

  void insert(std::span<const std::int64_t> ids);

  // Moves every waiting id "into flight" and returns them (never null, possibly empty). Ids inserted from now on, the same ones
  // included, wait for the next steal. Throws InvalidArgument while an earlier steal is neither committed nor rolled back:
  // two flights at once could be confirmed in the wrong order.
  Batch steal();

  // The ids in flight are durable: forgets them. Throws InvalidArgument when nothing is in flight.
  void commit();

  // The ids in flight did not become durable: they wait again, merged with those inserted since. Throws InvalidArgument when
  // nothing is in flight. On std::bad_alloc they are still in flight; call it again.
  void rollback();

  // Ids waiting for the next steal, and ids handed out and not yet confirmed. An id can be in both.
  std::size_t size() const;
  std::size_t in_flight() const;
  std::size_t bytes() const;

 private:
  std::unique_ptr<Gate> gate_;
  std::unique_ptr<StripedIdSet> ids_;
  // Serialises steal, commit and rollback; inserts do not take it.
  mutable std::mutex flight_mutex_;
  Batch flight_;
};

}  // namespace monolith
