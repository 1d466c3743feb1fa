// The memory of a table's rows, which have numbers and never move. A number is all an index has to keep: the address is one
// multiplication away (row_addresses.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "reserved_memory.h"
#include "row_addresses.h"

namespace monolith {

// Thread-safe.
class RowRegion {
 public:
  // Numbers are handed out in multiples of this many: the bits of eight rows are a byte, which then belongs to one shard alone.
  static constexpr std::uint32_t kRun = 8;

  explicit RowRegion(std::uint32_t row_bytes);  // throws std::bad_alloc
  RowRegion(const RowRegion&) = delete;
  RowRegion& operator=(const RowRegion&) = delete;

  RowAddresses addresses() const noexcept { return {addresses_.data(), row_bytes_}; }
  std::byte* at(std::uint32_t number) const noexcept { return addresses().at(number); }

  // The first of `rows` consecutive ones, at most RowAddresses::kSegmentRows, uninitialised; a multiple of kRun, and never 0, which
  // stands for "none". Throws std::bad_alloc or InvalidArgument (2^32 rows), changing nothing.
  std::uint32_t take(std::uint32_t rows);

  // Throws std::bad_alloc if the system would not give memory for this many rows.
  void check_room(std::uint64_t rows) const;

  // Every number handed out is below.
  std::uint64_t numbers() const;

  // Forgets all rows and gives their memory back.
  void release() noexcept;

  // Memory that is taken.
  std::size_t bytes() const;

 private:
  struct Segment {
    ReservedMemory memory;
    std::uint64_t first;  // number
    std::uint64_t last;   // behind the numbers it has addresses for
  };

  void add_segment(std::uint64_t rows);
  static constexpr std::uint64_t kFirst = kRun;

  const std::uint32_t row_bytes_;
  // The first segment is there from the beginning: row 0 stands for "none", and whoever asks where it is must not meet a writer.
  std::array<std::uintptr_t, RowAddresses::kSegments> addresses_{};
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  std::uint64_t next_ = kFirst;  // number, in the last segment
};

}  // namespace monolith
