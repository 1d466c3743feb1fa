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
  const std::uint64_t biased = next_ + RowChunk::kBias;
  const RowChunk chunk = RowChunk::of(biased);
  const bool is_first = next_ == 1;  // whose chunk is there already, for row 0, but has no memory
  if (is_first || chunk.number == chunks_.size()) {
    if (chunks_.size() == chunks_.capacity()) {
      chunks_.reserve(chunks_.size() + RowChunk::kChunksPerDoubling);
      view_->chunks = chunks_.data();
    }
    const std::byte* const rows = arena_->allocate((std::size_t{1} << chunk.log2_rows) * row_bytes_);
    const std::uint64_t first = biased >> chunk.log2_rows << chunk.log2_rows;
    if (!is_first) chunks_.emplace_back();
    chunks_[chunk.number] = reinterpret_cast<std::uintptr_t>(rows) - first * row_bytes_;
  }
  return next_++;
}

void RowPool::free(std::uint32_t row) noexcept {
  std::memcpy(at(row), &free_, sizeof(free_));
  free_ = row;
}

void RowPool::clear() noexcept {
  chunks_.resize(1);
  chunks_[0] = no_chunk_;
  next_ = 1;
  free_ = 0;
}

}  // namespace monolith
