// Which rows of one shard changed since the last cut, and the rows of a cut that is being read, as they were when it was made.
//
// Two bits per row: "waiting" (changed since the last cut; its id is in the list of waiting ids) and "in flight" (belongs
// to the cut; neither read nor changed since). A writer about to change a row in flight saves a copy of it first, so that a cut
// can be read while training goes on. A list may hold an id twice, or one whose row is gone: the bits decide.
//
// Not thread-safe: the shard's lock guards it, except the lists of a cut, which belong to its reader.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "bucket.h"
#include "fetch.h"
#include "monolith/table.h"
#include "reserved_memory.h"

namespace monolith {

// A list whose memory is used again. It is most of what tracking costs a writer: fresh memory is faulted in page by page.
class IdList {
 public:
  std::size_t size() const noexcept { return size_; }
  std::span<const std::int64_t> ids() const noexcept { return {room_.data(), size_}; }
  void make_room(std::size_t ids = 1) {
    if (room_.size() - size_ < ids) room_.resize(std::max({std::size_t{32}, 2 * room_.size(), size_ + ids}));
  }
  // There must be room. The id stays only if `keep`.
  void push(std::int64_t id, bool keep) noexcept {
    room_[size_] = id;
    size_ += keep;
  }
  // Where the next id goes; and the end of those that were put there.
  std::int64_t* end() noexcept { return room_.data() + size_; }
  void end_at(const std::int64_t* end) noexcept { size_ = static_cast<std::size_t>(end - room_.data()); }
  // Keeps its memory if a good part of it was needed.
  void clear() noexcept {
    if (size_ < room_.size() / 8) room_ = {};
    size_ = 0;
  }
  std::size_t bytes() const noexcept { return room_.capacity() * sizeof(room_[0]); }

 private:
  std::vector<std::int64_t> room_;
  std::size_t size_ = 0;
};

// Memory for the copies of rows that writers save, shared by the shards of a table and used again from piece to piece and from cut
// to cut: a writer that had to take fresh memory for each would mostly wait for the system to clear pages. Thread-safe.
class SavedRooms {
 public:
  static constexpr std::size_t kRows = 256;  // of one room

  explicit SavedRooms(std::size_t row_bytes) : row_bytes_(row_bytes) {}
  // Batches on loan; they go back by themselves.
  class Loan {
   public:
    Loan(SavedRooms& rooms, std::vector<RowBatch> batches) noexcept : rooms_(rooms), batches_(std::move(batches)) {}
    ~Loan() { rooms_.give_back(std::move(batches_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    const std::vector<RowBatch>& batches() const noexcept { return batches_; }

   private:
    SavedRooms& rooms_;
    std::vector<RowBatch> batches_;
  };

  // An empty batch with room for kRows rows. Throws std::bad_alloc.
  RowBatch take();
  // A cut has ended: keeps as many rooms as it needed at once, and frees the others.
  void end_cut() noexcept;
  std::size_t room_bytes() const noexcept { return kRows * (row_bytes_ + sizeof(std::int64_t) + sizeof(std::uint32_t)); }
  // Of the rooms that nobody uses.
  std::size_t bytes() const;

 private:
  void give_back(std::vector<RowBatch> batches) noexcept;

  const std::size_t row_bytes_;
  mutable std::mutex mutex_;
  std::vector<RowBatch> free_;
  std::size_t taken_ = 0;       // rooms in use
  std::size_t most_taken_ = 0;  // since the last cut
};

// One or two bits of all rows of a table, by row number. Thread-safe as far as it concerns rows of different shards, for which no byte is
// shared (RowRegion::kRun).
class ChangeBits {
 public:
  // Throws std::bad_alloc.
  explicit ChangeBits(std::size_t planes = 2) {
    for (std::size_t i = 0; i < planes; ++i) planes_.push_back(ReservedMemory::at_most(kBytes, kLeastBytes));
  }

  std::uint8_t* plane(std::size_t number) const noexcept { return reinterpret_cast<std::uint8_t*>(planes_[number].base()); }
  // There are bits for the rows below `rows` at least; returns for how many. Throws std::bad_alloc.
  std::uint64_t make_room(std::uint64_t rows);
  // All bits are zero. Nobody may use them meanwhile.
  void clear() noexcept;
  std::size_t bytes() const;

 private:
  static constexpr std::size_t kBytes = (std::size_t{1} << 32) / 8;
  static constexpr std::size_t kLeastBytes = kBytes >> 8;

  mutable std::mutex mutex_;
  std::vector<ReservedMemory> planes_;
  std::uint64_t rows_ = 0;
};

class ChangeSet {
 public:
  // The ids of a cut: rows that had changed, and rows that had been removed.
  struct Flight {
    IdList changed;
    std::vector<std::int64_t> erased;
    bool empty() const noexcept { return changed.size() == 0 && erased.empty(); }
  };

  // `bits` must have room for the rows that are there.
  ChangeSet(SavedRooms& rooms, ChangeBits& bits, std::size_t row_bytes)
      : rooms_(&rooms), bits_(&bits), row_bytes_(row_bytes), waiting_bits_(bits.plane(0)), flight_bits_(bits.plane(1)) {}

  // --- Writers. Each is called before the change it is about, and when it throws std::bad_alloc nothing is lost: at worst a row
  // counts as changed that was not.

  // The row or its time is about to change.
  void before_change(std::int64_t id, std::uint32_t row, std::uint32_t time, const std::byte* bytes) {
    if (unread_ && in_flight(row)) save(id, row, time, bytes);
    changed_.make_room();
    mark(id, row);
  }
  // The same for many rows. Ids that were not found, whose row is 0, may be among them.
  void before_changes(std::span<const Bucket::Match> found, const std::int64_t* ids, Bucket* const* buckets, std::byte* const* rows);
  // For a before_changes() to come.
  void prefetch(std::span<const Bucket::Match> found) const noexcept;
  // The id is about to get this row; inserted() then cannot fail.
  void before_insert(std::uint32_t row);
  void inserted(std::int64_t id, std::uint32_t row) noexcept { mark(id, row); }
  // Its removal must follow, and must not fail.
  void before_erase(std::int64_t id, std::uint32_t row, std::uint32_t time, const std::byte* bytes);
  // All rows of the table are about to go, `ids` of them here; save() those in flight first. cleared() then cannot fail; who calls it
  // clears the bits.
  void before_clear(std::size_t ids);
  void cleared(std::span<const std::int64_t> ids) noexcept;

  bool in_flight(std::uint32_t row) const noexcept { return (flight_bits_[row / 8] & bit(row)) != 0; }
  // Keeps a copy of a row in flight, which is so no longer.
  void save(std::int64_t id, std::uint32_t row, std::uint32_t time, const std::byte* bytes);

  // --- The cut.

  // Everything that waits goes into flight. Nothing may be in flight.
  void cut() noexcept;
  Flight& flight() noexcept { return flight_; }
  // The row has been read.
  void land(std::uint32_t row) noexcept { flight_bits_[row / 8] &= static_cast<std::uint8_t>(~bit(row)); }
  // Copies saved since the last call; once all ids have been looked at there will be no more.
  SavedRooms::Loan take_saved() noexcept;
  void all_read() noexcept { unread_ = false; }

  // The row waits again, whatever happened to it since.
  void put_back(std::int64_t id, std::uint32_t row);
  // The ids that were removed wait again. Throws std::bad_alloc, changing nothing.
  void put_back_erased();
  // Ends the flight. All rows must have landed or been put back.
  void end_flight() noexcept;

  // Rows and removals that wait.
  std::uint64_t waiting() const noexcept { return changed_.size() - gone_ + erased_.size(); }
  std::size_t bytes() const noexcept;

 private:
  static std::uint8_t bit(std::uint32_t row) noexcept { return static_cast<std::uint8_t>(1u << (row % 8)); }
  void mark(std::int64_t id, std::uint32_t row) noexcept {
    std::uint8_t& byte = waiting_bits_[row / 8];
    changed_.push(id, (byte & bit(row)) == 0);
    byte |= bit(row);
  }

  SavedRooms* rooms_;
  ChangeBits* bits_;
  std::size_t row_bytes_;
  // Between flights all of flight_bits_ is zero, so that a cut only has to swap the two.
  std::uint8_t* waiting_bits_;
  std::uint8_t* flight_bits_;
  std::uint64_t room_ = 0;    // rows that there are bits for, at least
  std::uint8_t none_ = 0xff;  // the waiting bits of row 0: it is never put into the list
  IdList changed_;
  std::size_t gone_ = 0;  // entries of that list whose row was removed later
  std::vector<std::int64_t> erased_;

  Flight flight_;
  bool unread_ = false;          // some row may be in flight
  std::vector<RowBatch> saved_;  // in rooms of their own: a long list never moves
};

}  // namespace monolith
