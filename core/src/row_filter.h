// Dropping rows from a batch of raw copies.
#pragma once

#include <cstring>

#include "monolith/table.h"

namespace monolith {

// Of the rows from `from` on, keeps those for which keep(id, time) is true.
template <typename Keep>
void filter_rows(std::size_t row_bytes, RowBatch& batch, std::size_t from, Keep&& keep) {
  std::size_t kept = from;
  for (std::size_t i = from; i < batch.ids.size(); ++i) {
    if (!keep(batch.ids[i], batch.times[i])) continue;
    batch.ids[kept] = batch.ids[i];
    batch.times[kept] = batch.times[i];
    std::memmove(batch.rows.data() + kept * row_bytes, batch.rows.data() + i * row_bytes, row_bytes);
    ++kept;
  }
  batch.ids.resize(kept);
  batch.times.resize(kept);
  batch.rows.resize(kept * row_bytes);
}

}  // namespace monolith
