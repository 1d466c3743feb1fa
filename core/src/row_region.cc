#include "row_region.h"

#include <algorithm>
#include <new>

#include "monolith/error.h"

namespace monolith {

RowRegion::RowRegion(std::uint32_t row_bytes) : row_bytes_(row_bytes) { add_segment(kRun); }

// Room for `rows` at least.
void RowRegion::add_segment(std::uint64_t rows) {
  const std::uint64_t number = segments_.empty() ? 0 : (segments_.back().last + RowAddresses::kSegmentRows - 1) >> RowAddresses::kSegmentBits;
  if (number == RowAddresses::kSegments) {
    throw InvalidArgument("table: 2^32 row numbers are used up; spread the table over more processes");
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(2 * segments_.size() + 1);
  // A small table takes few addresses: some processes have to live with little (ulimit -v).
  constexpr std::uint64_t kSmallest = RowAddresses::kSegmentRows >> 5;
  const std::uint64_t wanted = std::max(rows, std::clamp(4 * next_, kSmallest, RowAddresses::kSegmentRows));
  ReservedMemory memory = ReservedMemory::at_most(wanted * row_bytes_, rows * row_bytes_);
  const std::uint64_t room = std::min(memory.size() / row_bytes_, RowAddresses::kSegmentRows);
  const std::uint64_t first = number << RowAddresses::kSegmentBits;
  addresses_[number] = reinterpret_cast<std::uintptr_t>(memory.base()) - first * row_bytes_;
  segments_.push_back({std::move(memory), first, first + room});
}

std::uint32_t RowRegion::take(std::uint32_t rows) {
  const std::lock_guard guard(mutex_);
  if (next_ + rows > segments_.back().last) {
    add_segment(rows);
    next_ = segments_.back().first;
  }
  Segment& segment = segments_.back();
  segment.memory.commit((next_ + rows - segment.first) * row_bytes_);
  const auto first = static_cast<std::uint32_t>(next_);
  next_ += rows;
  return first;
}

void RowRegion::check_room(std::uint64_t rows) const {
  if (rows > RowAddresses::kSegments * RowAddresses::kSegmentRows - kFirst) throw std::bad_alloc();
  // All at once: the system refuses what it cannot have only if it is asked for in one piece.
  ReservedMemory all(rows * row_bytes_);
  all.commit(all.size());
}

std::uint64_t RowRegion::numbers() const {
  const std::lock_guard guard(mutex_);
  return next_;
}

void RowRegion::release() noexcept {
  const std::lock_guard guard(mutex_);
  segments_.resize(1);
  segments_.front().memory.drop();
  next_ = kFirst;
}

std::size_t RowRegion::bytes() const {
  const std::lock_guard guard(mutex_);
  std::size_t bytes = 0;
  for (const Segment& segment : segments_) {
    const std::uint64_t last = std::min(segment.last, next_);
    bytes += ReservedMemory::bytes_for((last - segment.first) * row_bytes_);
  }
  return bytes;
}

}  // namespace monolith
