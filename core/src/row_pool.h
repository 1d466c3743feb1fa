// The rows of one shard, numbered from 1, in chunks that never move. Not thread-safe: the shard's lock guards it.
// Row 0 exists but is never handed out: it stands for "none", and a CPU that speculates on it finds valid memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"

namespace monolith {

class RowPool {
 public:
  RowPool(Arena& arena, std::uint32_t row_bytes) : arena_(&arena), row_bytes_(row_bytes) {}

  std::byte* at(std::uint32_t row) const noexcept {
    const Place place = locate(row);
    return chunks_[place.chunk] + place.offset * row_bytes_;
  }

  // An uninitialised row. Throws std::bad_alloc or InvalidArgument (2^32 rows), leaving the pool as it was.
  std::uint32_t allocate();

  // The row's memory will be handed out again.
  void free(std::uint32_t row) noexcept;

  // Forgets all rows; the arena's owner releases their memory.
  void clear() noexcept;

  std::size_t bytes() const noexcept { return chunks_.capacity() * sizeof(std::byte*); }

 private:
  struct Place {
    std::size_t chunk;
    std::size_t offset;
  };

  // Sixteen chunks per doubling: the chunk number is the exponent and the top four mantissa bits of the row number, so a
  // chunk is at most a sixteenth of what is there and the chunk table stays in cache.
  static constexpr int kMantissaBits = 4;
  static constexpr std::uint64_t kBias = 64;  // the first chunks hold 64 / 16 rows
  static constexpr int kFirstExponent = static_cast<int>(std::bit_width(kBias)) - 1;

  static Place locate(std::uint32_t row) noexcept {
    const std::uint64_t biased = row + kBias;
    const int exponent = static_cast<int>(std::bit_width(biased)) - 1;
    const std::uint64_t mantissa = biased >> (exponent - kMantissaBits);  // 16..31
    return {static_cast<std::size_t>(exponent - kFirstExponent) * 16 + (mantissa - 16),
            biased & ((std::uint64_t{1} << (exponent - kMantissaBits)) - 1)};
  }

  Arena* arena_;
  std::uint32_t row_bytes_;
  std::uint32_t next_ = 1;  // the lowest number never handed out
  std::uint32_t free_ = 0;  // head of the free list, threaded through the rows; 0 = empty
  std::vector<std::byte*> chunks_ = {nullptr};  // the first is always there, for row 0
};

}  // namespace monolith
