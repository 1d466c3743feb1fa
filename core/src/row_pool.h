// The rows of one shard, numbered from 1, in chunks that never move. Not thread-safe: the shard's lock guards it.
// Row 0 exists but is never handed out: it stands for "none", and a CPU that speculates on it finds valid memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "shard_view.h"

namespace monolith {

class RowPool {
 public:
  // Keeps view.chunks true.
  RowPool(Arena& arena, ShardView& view, std::uint32_t row_bytes)
      : arena_(&arena), view_(&view), row_bytes_(row_bytes), no_chunk_(0 - RowChunk::kBias * row_bytes), chunks_{no_chunk_} {
    view_->chunks = chunks_.data();
  }
  RowPool(const RowPool&) = delete;
  RowPool& operator=(const RowPool&) = delete;

  std::byte* at(std::uint32_t row) const noexcept { return view_->row(row, row_bytes_); }

  // An uninitialised row. Throws std::bad_alloc or InvalidArgument (2^32 rows), leaving the pool as it was.
  std::uint32_t allocate();

  // The row's memory will be handed out again.
  void free(std::uint32_t row) noexcept;

  // Forgets all rows; the arena's owner releases their memory.
  void clear() noexcept;

  // Every row number in use is below.
  std::uint32_t numbers() const noexcept { return next_; }

  std::size_t bytes() const noexcept { return chunks_.capacity() * sizeof(chunks_[0]); }

 private:
  Arena* arena_;
  ShardView* view_;
  std::uint32_t row_bytes_;
  std::uint32_t next_ = 1;  // the lowest number never handed out
  std::uint32_t free_ = 0;  // head of the free list, threaded through the rows; 0 = empty
  const std::uintptr_t no_chunk_;        // with it row 0 is at null
  std::vector<std::uintptr_t> chunks_;  // as ShardView has them; the first is always there, for row 0
};

}  // namespace monolith
