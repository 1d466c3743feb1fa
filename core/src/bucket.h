// Four ids with their row numbers and times: the unit of the index.
#pragma once

#include <bit>
#include <cstdint>

namespace monolith {

// One cache line. Slots fill from the front; row 0 marks an empty one, so zeroed memory is an empty bucket.
struct alignas(64) Bucket {
  static constexpr int kSlots = 4;
  std::int64_t ids[kSlots];
  std::uint32_t rows[kSlots];
  std::uint32_t times[kSlots];

  bool full() const noexcept { return rows[kSlots - 1] != 0; }
  // One bit per slot that holds the id. An empty slot may hold the id of a removed or moved one, but only behind the live
  // slots, so the lowest bit is the live one if there is any.
  unsigned matches(std::int64_t id) const noexcept {
    unsigned bits = 0;
    for (int i = 0; i < kSlots; ++i) bits |= static_cast<unsigned>(ids[i] == id) << i;
    return bits;
  }
  // The slot of an id, or -1.
  int match(std::int64_t id) const noexcept {
    const unsigned bits = matches(id);
    const int slot = std::countr_zero(bits | 1u << (kSlots - 1));
    return bits != 0 && rows[slot] != 0 ? slot : -1;
  }
};
static_assert(sizeof(Bucket) == 64);

}  // namespace monolith
