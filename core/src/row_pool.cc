#include "row_pool.h"

#include <cstring>
#include <limits>

#include "monolith/error.h"

namespace monolith {

std::uint32_t RowPool::allocate() {
  if (free_ != 0) {
    const std::uint32_t row = free_;
    std::memcpy(&free_, at(row), sizeof(free_));
    return row;
  }
  if (next_ == std::numeric_limits<std::uint32_t>::max()) {
    throw InvalidArgument("table: a shard holds 2^32 - 2 rows and is full; spread the table over more processes");
  }
  const RowPlace place = RowPlace::of(next_);
  if (place.chunk == chunks_.size()) {
    if (chunks_.size() == chunks_.capacity()) {
      chunks_.reserve(chunks_.size() + RowPlace::kChunksPerDoubling);
      view_->chunks = chunks_.data();
    }
    chunks_.push_back(nullptr);
  }
  if (chunks_[place.chunk] == nullptr) {
    const int exponent = static_cast<int>(place.chunk / RowPlace::kChunksPerDoubling) + RowPlace::kFirstExponent;
    const std::size_t rows = std::size_t{1} << (exponent - RowPlace::kMantissaBits);
    chunks_[place.chunk] = arena_->allocate(rows * row_bytes_);
  }
  return next_++;
}

void RowPool::free(std::uint32_t row) noexcept {
  std::memcpy(at(row), &free_, sizeof(free_));
  free_ = row;
}

void RowPool::clear() noexcept {
  chunks_.resize(1);
  chunks_[0] = nullptr;
  next_ = 1;
  free_ = 0;
}

}  // namespace monolith
