// Dropping rows from a batch of raw copies.
#pragma once

#include <cstring>

#include "monolith/table.h"

namespace monolith {

// Rows as they lie in memory, one array for each part of them.
struct RowArrays {
  std::int64_t* ids;
  std::uint32_t* times;
  std::byte* rows;
  std::size_t size;
};

// Of the rows from `from` on, moves those for which keep(id, time) is true to the front; returns how many rows there are then.
template <typename Keep>
std::size_t keep_rows(std::size_t row_bytes, const RowArrays& rows, std::size_t from, Keep&& keep) {
  std::size_t kept = from;
  for (std::size_t i = from; i < rows.size; ++i) {
    if (!keep(rows.ids[i], rows.times[i])) continue;
    rows.ids[kept] = rows.ids[i];
    rows.times[kept] = rows.times[i];
    std::memmove(rows.rows + kept * row_bytes, rows.rows + i * row_bytes, row_bytes);
    ++kept;
  }
  return kept;
}

// The same for a batch, without the rows that were not kept.
template <typename Keep>
void filter_rows(std::size_t row_bytes, RowBatch& batch, std::size_t from, Keep&& keep) {
  const RowArrays rows{batch.ids.data(), batch.times.data(), batch.rows.data(), batch.ids.size()};
  const std::size_t kept = keep_rows(row_bytes, rows, from, keep);
  batch.ids.resize(kept);
  batch.times.resize(kept);
  batch.rows.resize(kept * row_bytes);
}

}  // namespace monolith
