// A set that remembers which ids were written since somebody last asked, with the original's bound: when it holds more than
// `capacity` ids it forgets all of them and says how many. What never forgets is Table::track_changes().
//
// Any int64 is a valid id. The order of stolen ids is unspecified.
//
// Thread-safety: every method may be called from any number of threads at once.
// Ownership: ids are copied in; stolen ids belong to the caller.
// Failure: std::bad_alloc from any call that stores or returns ids. insert: ids of the call may already be in the set, nothing
// that was in it before is lost, and inserting the same ids again is safe. steal: the set is unchanged.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
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

}  // namespace monolith
