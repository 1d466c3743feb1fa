// Admission filters: which ids that the table does not hold yet may enter it. Most ids of a stream are seen once or twice; a
// filter keeps them from taking a row each.
//
// The caller asks only for ids that the table does not contain. No filter at all is a null pointer: everything is admitted.
//
// Thread-safety: every method may be called from any number of threads at once.
// Ownership: a filter may be shared by several tables (ids carry their slot, so features do not mix); it refers to none of them.
// Units: thresholds, counts and capacities are occurrences or ids, never bytes unless the name says so.
// Failure: constructors throw InvalidArgument; restore throws CorruptFile; std::bad_alloc passes through. After any of these the
// filter is as before the call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

namespace monolith {

// Occurrence thresholds by the slot of a fid v2, i.e. bits 48..62 of the id. Immutable.
class SlotThresholds {
 public:
  static constexpr std::uint32_t kSlots = 1u << 15;

  // Slots that are not in `by_slot` get `default_threshold`. Throws InvalidArgument for a slot above 32767.
  explicit SlotThresholds(std::uint32_t default_threshold, const std::map<std::uint32_t, std::uint32_t>& by_slot = {});

  std::uint32_t of(std::int64_t id) const noexcept {
    return thresholds_[static_cast<std::uint64_t>(id) >> 48 & (kSlots - 1)];
  }

  // Throws InvalidArgument, naming the slot, if a threshold is above `most`; `why` ends the message.
  void require_at_most(std::uint32_t most, const char* filter, const char* why) const;

  std::size_t bytes() const noexcept { return thresholds_.capacity() * sizeof(std::uint32_t); }

 private:
  std::uint32_t default_threshold_;
  std::vector<std::uint32_t> thresholds_;
};

class AdmissionFilter {
 public:
  virtual ~AdmissionFilter() = default;
  AdmissionFilter(const AdmissionFilter&) = delete;
  AdmissionFilter& operator=(const AdmissionFilter&) = delete;

  // Counts `count` (>= 1) occurrences of an id that is not in the table; true if its update may go through.
  // A slot whose threshold is 0 is always admitted and never counted.
  virtual bool admit(std::int64_t id, std::uint32_t count) = 0;

  // The same for every id in order, duplicates included, into out. counts is empty (1 each) or has one entry per id, each >= 1.
  // Throws InvalidArgument, before counting anything, when lengths differ or a count is 0. On std::bad_alloc some of the ids may
  // have been counted.
  void admit(std::span<const std::int64_t> ids, std::span<const std::uint32_t> counts, std::span<bool> out);

  // The whole state as bytes (see docs/formats.md): versioned, little endian, ending in a CRC-32C.
  virtual std::vector<std::byte> serialize() const = 0;

  // Replaces the state by what serialize() gave. Everything is checked before anything is allocated or changed. Throws CorruptFile
  // for bytes that are truncated, altered, of another version, or made by a filter with other parameters. Thresholds are not part
  // of the state: they may change between runs.
  virtual void restore(std::span<const std::byte> bytes) = 0;

  // Memory held now, in bytes.
  virtual std::size_t bytes() const = 0;

  std::uint32_t threshold(std::int64_t id) const noexcept { return thresholds_.of(id); }

 protected:
  explicit AdmissionFilter(SlotThresholds thresholds) : thresholds_(std::move(thresholds)) {}

  const SlotThresholds& thresholds() const noexcept { return thresholds_; }

  // counts is null for 1 each; the arguments are already checked.
  virtual void admit_batch(std::span<const std::int64_t> ids, const std::uint32_t* counts, bool* out) = 0;

 private:
  SlotThresholds thresholds_;
};

// Drops the first T occurrences of an id and admits from occurrence T + 1 on: the update is dropped if and only if the count
// before it is below T. A batch that brings c copies of an unseen id at once is dropped whole, however large c is.
//
// Counters have 4 bits (they stop at 15) and a 12-bit signature. Two ids that meet in the same 16 cells with the same signature
// share a counter: about 1% of new ids find a count that is not theirs when the ring is full. Counters live in a ring of
// `split_num` splits: new ones go to the head split; when it is full the head moves on and the split that was written longest
// ago is forgotten. An id that is seen again takes its count along. When the 16 cells of an id are all taken, in the head and
// in the split after it, it is admitted and counted in failure_count(): the filter fails open.
class SlidingFilter final : public AdmissionFilter {
 public:
  static constexpr std::uint32_t kForwardWindow = 2;
  static constexpr std::uint32_t kProbeLimit = 16;
  static constexpr std::uint32_t kMaxCount = 15;
  static constexpr std::uint64_t kMinCapacity = 300;
  static constexpr std::uint64_t kMaxCapacity = std::uint64_t{1} << 40;
  static constexpr std::uint32_t kMinSplits = 5;
  static constexpr std::uint32_t kMaxSplits = 1024;

  // capacity: ids remembered at the same time, about. Memory grows with use up to max_bytes(), about
  // 2.4 * capacity * split_num / (split_num - 1) bytes. Throws InvalidArgument if a threshold is above kMaxCount, or
  // capacity or split_num is out of range, or a split would hold fewer than 2 ids.
  SlidingFilter(std::uint64_t capacity, std::uint32_t split_num, SlotThresholds thresholds);
  ~SlidingFilter() override;

  using AdmissionFilter::admit;
  bool admit(std::int64_t id, std::uint32_t count) override;
  std::vector<std::byte> serialize() const override;
  void restore(std::span<const std::byte> bytes) override;
  std::size_t bytes() const override;

  // Adds to the id's counter, whatever its threshold, and returns the count before; kMaxCount if there was no room.
  std::uint32_t add(std::int64_t id, std::uint32_t count);
  // The count that add would return; changes nothing, failure_count() included.
  std::uint32_t get(std::int64_t id) const;

  std::uint64_t capacity() const noexcept { return capacity_; }
  std::uint32_t split_num() const noexcept { return split_num_; }
  std::uint64_t split_capacity() const noexcept { return split_capacity_; }
  std::size_t max_bytes() const noexcept;
  // The split that takes new counters, how often it moved on, and how many ids were admitted for lack of room.
  std::uint32_t head() const;
  std::uint64_t head_increment() const;
  std::uint64_t failure_count() const;
  // Counters in each split.
  std::vector<std::uint64_t> elements() const;

 private:
  class Split;
  struct State;
  struct Saved;

  void admit_batch(std::span<const std::int64_t> ids, const std::uint32_t* counts, bool* out) override;
  std::uint32_t add_locked(std::uint64_t hash, std::uint32_t count);
  std::uint32_t carried_count(std::uint64_t hash) const noexcept;
  void prefetch(std::uint64_t hash) const noexcept;
  Saved parse(std::span<const std::byte> bytes) const;

  const std::uint64_t capacity_;
  const std::uint32_t split_num_;
  const std::uint64_t split_capacity_;
  const std::uint64_t homes_;  // cells that can be an id's first; a split has some more after them, for probing
  mutable std::mutex mutex_;
  std::unique_ptr<State> state_;
};

// Keeps no counters: each occurrence of an id that is not in the table is admitted by chance. With threshold T and
// `count` occurrences at once the probability is
//   equal_probability:      1 - 0.05^(count / T)   so that about 95% of ids are in after T occurrences
//   not equal_probability:  min(1, count / T)
// The draw is a hash of (seed, id, number of draws so far), so the same calls in the same order give the same answers.
class ProbabilisticFilter final : public AdmissionFilter {
 public:
  ProbabilisticFilter(bool equal_probability, std::uint64_t seed, SlotThresholds thresholds);

  using AdmissionFilter::admit;
  bool admit(std::int64_t id, std::uint32_t count) override;
  std::vector<std::byte> serialize() const override;
  void restore(std::span<const std::byte> bytes) override;
  std::size_t bytes() const override;

  // The probability used for a threshold >= 1 and count >= 1.
  double probability(std::uint32_t threshold, std::uint32_t count) const noexcept;
  bool equal_probability() const noexcept { return equal_probability_; }
  std::uint64_t seed() const noexcept { return seed_; }
  std::uint64_t draws() const noexcept { return draws_.load(std::memory_order_relaxed); }

 private:
  void admit_batch(std::span<const std::int64_t> ids, const std::uint32_t* counts, bool* out) override;

  const bool equal_probability_;
  const std::uint64_t seed_;
  std::atomic<std::uint64_t> draws_{0};
};

}  // namespace monolith
