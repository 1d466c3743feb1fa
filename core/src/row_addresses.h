// Where the rows of a table are, by their numbers, as plain data for the kernels: no function of the standard library, and every
// function must be inlined (CMakeLists.txt says why).
#pragma once

#include <cstddef>
#include <cstdint>

namespace monolith {

struct RowAddresses {
  // Rows of one segment: a few hundred megabytes of addresses, so that few segments are in use and their addresses in the first cache.
  static constexpr int kSegmentBits = 22;
  static constexpr std::uint64_t kSegmentRows = std::uint64_t{1} << kSegmentBits;
  static constexpr std::uint64_t kSegments = (std::uint64_t{1} << 32) / kSegmentRows;

  const std::uintptr_t* segments;  // [kSegments], where row 0 would be if all rows lay as those of the segment do
  std::uint32_t row_bytes;

  [[gnu::always_inline]] std::byte* at(std::uint32_t number) const noexcept {
    return reinterpret_cast<std::byte*>(segments[number >> kSegmentBits] + std::uint64_t{number} * row_bytes);
  }
};

}  // namespace monolith
