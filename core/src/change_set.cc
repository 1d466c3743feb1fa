#include "change_set.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace monolith {

RowBatch SavedRooms::take() {
  const std::lock_guard guard(mutex_);
  RowBatch batch;
  if (free_.empty()) {
    // There must be a place for every room that is out there: giving back cannot fail.
    if (free_.capacity() <= taken_) free_.reserve(2 * taken_ + 16);
    batch.ids.reserve(kRows);
    batch.times.reserve(kRows);
    batch.rows.reserve(kRows * row_bytes_);
  } else {
    batch = std::move(free_.back());
    free_.pop_back();
  }
  most_taken_ = std::max(most_taken_, ++taken_);
  return batch;
}

void SavedRooms::give_back(std::vector<RowBatch> batches) noexcept {
  const std::lock_guard guard(mutex_);
  for (RowBatch& batch : batches) {
    batch.clear();
    free_.push_back(std::move(batch));
  }
  taken_ -= batches.size();
}

void SavedRooms::end_cut() noexcept {
  const std::lock_guard guard(mutex_);
  if (free_.size() > most_taken_) free_.resize(most_taken_);
  most_taken_ = taken_;
}

std::size_t SavedRooms::bytes() const {
  const std::lock_guard guard(mutex_);
  return free_.size() * room_bytes();
}

std::uint64_t ChangeBits::make_room(std::uint64_t rows) {
  const std::lock_guard guard(mutex_);
  if (rows <= rows_) return rows_;
  constexpr std::uint64_t kStep = std::uint64_t{1} << 16;
  const std::uint64_t room = (rows + kStep - 1) / kStep * kStep;
  for (ReservedMemory& plane : planes_) plane.commit(room / 8);
  return rows_ = room;
}

void ChangeBits::clear() noexcept {
  const std::lock_guard guard(mutex_);
  for (ReservedMemory& plane : planes_) std::memset(plane.base(), 0, rows_ / 8);
}

std::size_t ChangeBits::bytes() const {
  const std::lock_guard guard(mutex_);
  return sizeof(*this) + planes_.size() * ReservedMemory::bytes_for(rows_ / 8);
}

void ChangeSet::prefetch(std::span<const Bucket::Match> found) const noexcept {
  const std::uint8_t* const waiting = waiting_bits_;
  for (const Bucket::Match& match : found) fetch(waiting + match.row / 8);
  if (!unread_) return;
  for (const Bucket::Match& match : found) fetch(flight_bits_ + match.row / 8);
}

void ChangeSet::before_changes(std::span<const Bucket::Match> found, const std::int64_t* ids, Bucket* const* buckets,
                               std::byte* const* rows) {
  changed_.make_room(found.size());
  if (unread_) {
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (in_flight(found[i].row)) save(ids[i], found[i].row, buckets[i]->times[found[i].slot], rows[i]);
    }
  }
  // As mark(), free of branches: whether a row has changed already is a coin toss in the middle of an interval.
  std::uint8_t* const waiting = waiting_bits_;
  std::int64_t* end = changed_.end();
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint32_t row = found[i].row;
    auto* const byte = reinterpret_cast<std::uint8_t*>(choose(row != 0, waiting + row / 8, &none_));
    const std::uint8_t before = *byte;
    *byte = static_cast<std::uint8_t>(before | bit(row));
    *end = ids[i];
    end += (before & bit(row)) == 0;
  }
  changed_.end_at(end);
}

void ChangeSet::before_insert(std::uint32_t row) {
  changed_.make_room();
  if (row >= room_) room_ = bits_->make_room(std::uint64_t{row} + 1);
}

void ChangeSet::before_erase(std::int64_t id, std::uint32_t row, std::uint32_t time, const std::byte* bytes) {
  if (unread_ && in_flight(row)) save(id, row, time, bytes);
  erased_.push_back(id);
  // The row's number will be another id's.
  gone_ += (waiting_bits_[row / 8] & bit(row)) != 0;
  waiting_bits_[row / 8] &= static_cast<std::uint8_t>(~bit(row));
}

void ChangeSet::before_clear(std::size_t ids) { erased_.reserve(erased_.size() + ids); }

void ChangeSet::cleared(std::span<const std::int64_t> ids) noexcept {
  erased_.insert(erased_.end(), ids.begin(), ids.end());
  changed_.clear();
  gone_ = 0;
}

void ChangeSet::save(std::int64_t id, std::uint32_t row, std::uint32_t time, const std::byte* bytes) {
  if (saved_.empty() || saved_.back().ids.size() == SavedRooms::kRows) {
    if (saved_.size() == saved_.capacity()) saved_.reserve(2 * saved_.size() + 4);  // before a room is taken, which would be lost
    saved_.push_back(rooms_->take());
  }
  RowBatch& batch = saved_.back();
  batch.ids.push_back(id);
  batch.times.push_back(time);
  batch.rows.insert(batch.rows.end(), bytes, bytes + row_bytes_);
  land(row);
}

void ChangeSet::cut() noexcept {
  std::swap(waiting_bits_, flight_bits_);
  std::swap(changed_, flight_.changed);
  flight_.erased = std::exchange(erased_, {});
  gone_ = 0;
  unread_ = flight_.changed.size() != 0;
}

SavedRooms::Loan ChangeSet::take_saved() noexcept { return {*rooms_, std::exchange(saved_, {})}; }

void ChangeSet::put_back(std::int64_t id, std::uint32_t row) {
  changed_.make_room();
  mark(id, row);
  land(row);
}

void ChangeSet::put_back_erased() { erased_.insert(erased_.end(), flight_.erased.begin(), flight_.erased.end()); }

void ChangeSet::end_flight() noexcept {
  unread_ = false;
  take_saved();  // nobody wants them: their rooms go back
  flight_.changed.clear();
  flight_.erased = {};
}

std::size_t ChangeSet::bytes() const noexcept {
  const std::size_t erased = (erased_.capacity() + flight_.erased.capacity()) * sizeof(std::int64_t);
  const std::size_t saved = saved_.size() * rooms_->room_bytes();
  return sizeof(*this) + changed_.bytes() + flight_.changed.bytes() + erased + saved;
}

}  // namespace monolith
