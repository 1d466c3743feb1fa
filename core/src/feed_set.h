// Which rows of one shard were written or removed since the feed was last read. Unlike a cut (change_set.h) the feed wants each row as
// it is when it is read, not as it was at one moment: so no copies are saved, and one bit per row is enough, "fed" (written since it
// was read; its id is in the list). The list may hold an id twice, or one whose row is gone: the bits decide.
//
// Not thread-safe: the shard's lock guards it, except what take() gave, which belongs to the reader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bucket.h"
#include "change_set.h"
#include "fetch.h"

namespace monolith {

// What a writer needs is in one cache line: a batch meets every shard, and most of the sets are in no cache.
class alignas(64) FeedSet {
 public:
  struct Taken {
    IdList changed;
    std::vector<std::int64_t> erased;
  };

  // `bits` must have room for the rows that are there.
  explicit FeedSet(ChangeBits& bits) : bits_(&bits), fed_(bits.plane(0)) {}

  // --- Writers, as of ChangeSet: before the change, and when one throws std::bad_alloc nothing is lost.

  void before_change(std::int64_t id, std::uint32_t row) {
    changed_.make_room();
    mark(id, row);
  }
  // Ids that were not found, whose row is 0, may be among them.
  void before_changes(std::span<const Bucket::Match> found, const std::int64_t* ids) {
    changed_.make_room(found.size());
    std::int64_t* end = changed_.end();
    for (std::size_t i = 0; i < found.size(); ++i) {
      const std::uint32_t row = found[i].row;
      auto* const byte = reinterpret_cast<std::uint8_t*>(choose(row != 0, fed_ + row / 8, &none_));
      const std::uint8_t before = *byte;
      *byte = static_cast<std::uint8_t>(before | bit(row));
      *end = ids[i];
      end += (before & bit(row)) == 0;
    }
    changed_.end_at(end);
  }
  // The bits of rows of any shard, without a look at its set. `fed` is the plane of the bits.
  static void prefetch(const std::uint8_t* fed, std::span<const Bucket::Match> found) noexcept {
    for (const Bucket::Match& match : found) fetch(fed + match.row / 8);
  }
  // Where the next ids go.
  void prefetch_list() noexcept { fetch(changed_.end()); }
  void prefetch(std::uint32_t row) const noexcept { fetch(fed_ + row / 8); }
  void before_insert(std::uint32_t row) {
    changed_.make_room();
    if (row >= room_) room_ = bits_->make_room(std::uint64_t{row} + 1);
  }
  void inserted(std::int64_t id, std::uint32_t row) noexcept { mark(id, row); }
  // erased() then cannot fail, and if the row stays after all, the reader finds it there.
  void before_erase(std::int64_t id) { erased_.push_back(id); }
  void erased(std::uint32_t row) noexcept { land(row); }  // its number will be another id's
  void before_clear(std::size_t ids) { erased_.reserve(erased_.size() + ids); }
  // Who calls it clears the bits.
  void cleared(std::span<const std::int64_t> ids) noexcept {
    erased_.insert(erased_.end(), ids.begin(), ids.end());
    changed_.clear();
  }

  // --- The reader.

  // Everything since the last call. Bits stay set until land(), so a row that is written before it is read is not listed again.
  void take(Taken& to) noexcept {
    to.changed.clear();
    std::swap(changed_, to.changed);
    to.erased = std::exchange(erased_, {});
  }
  bool is_fed(std::uint32_t row) const noexcept { return (fed_[row / 8] & bit(row)) != 0; }
  void land(std::uint32_t row) noexcept { fed_[row / 8] &= static_cast<std::uint8_t>(~bit(row)); }

  std::uint64_t waiting() const noexcept { return changed_.size() + erased_.size(); }
  std::size_t bytes() const noexcept { return sizeof(*this) + changed_.bytes() + erased_.capacity() * sizeof(std::int64_t); }

 private:
  static std::uint8_t bit(std::uint32_t row) noexcept { return static_cast<std::uint8_t>(1u << (row % 8)); }
  void mark(std::int64_t id, std::uint32_t row) noexcept {
    std::uint8_t& byte = fed_[row / 8];
    changed_.push(id, (byte & bit(row)) == 0);
    byte |= bit(row);
  }

  ChangeBits* bits_;
  std::uint8_t* fed_;
  std::uint64_t room_ = 0;    // rows that there are bits for, at least
  std::uint8_t none_ = 0xff;  // the bits of row 0: it is never put into the list
  IdList changed_;
  std::vector<std::int64_t> erased_;
};

}  // namespace monolith
