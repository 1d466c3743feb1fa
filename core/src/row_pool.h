// The rows of one shard. Not thread-safe: the shard's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "row_region.h"

namespace monolith {

class RowPool {
 public:
  explicit RowPool(RowRegion& region) : region_(&region) {}
  RowPool(const RowPool&) = delete;
  RowPool& operator=(const RowPool&) = delete;

  std::byte* at(std::uint32_t row) const noexcept { return region_->at(row); }

  // An uninitialised row. Throws as RowRegion::take, leaving the pool as it was.
  std::uint32_t allocate() {
    if (free_ != 0) return take_freed();
    if (next_ == last_) [[unlikely]] extend();
    return next_++;
  }

  // The row's memory will be handed out again.
  void free(std::uint32_t row) noexcept;

  // Forgets all rows; the owner of the region releases their memory.
  void clear() noexcept { next_ = last_ = free_ = taken_ = 0; }

 private:
  std::uint32_t take_freed() noexcept;
  void extend();

  RowRegion* region_;
  std::uint32_t next_ = 0, last_ = 0;  // the numbers that were never handed out
  std::uint32_t free_ = 0;             // head of the free list, threaded through the rows; 0 = empty
  std::uint32_t taken_ = 0;            // from the region
};

}  // namespace monolith
