#include "row_pool.h"

#include <algorithm>
#include <cstring>

namespace monolith {

std::uint32_t RowPool::take_freed() noexcept {
  const std::uint32_t row = free_;
  std::memcpy(&free_, at(row), sizeof(free_));
  return row;
}

// By a sixty-fourth of what is there: little memory waits unused.
void RowPool::extend() {
  constexpr std::uint32_t kRun = RowRegion::kRun;
  const std::uint32_t rows = std::clamp(taken_ / 64 / kRun * kRun, kRun, 512 * kRun);
  next_ = region_->take(rows);
  last_ = next_ + rows;
  taken_ += rows;
}

void RowPool::free(std::uint32_t row) noexcept {
  std::memcpy(at(row), &free_, sizeof(free_));
  free_ = row;
}

}  // namespace monolith
