#include "monolith/fids.h"

#include <string>

#include "monolith/error.h"

namespace monolith {

void stack_fids(std::span<const std::span<const std::int64_t>> columns, std::span<const std::int64_t> slots,
                std::span<std::int64_t> out) {
  const std::size_t n = columns.size();
  if (slots.size() != n) {
    throw InvalidArgument("slots: expected one per column, " + std::to_string(n) + ", got " + std::to_string(slots.size()));
  }
  const std::size_t rows = n == 0 ? 0 : columns[0].size();
  if (out.size() != rows * n) throw InvalidArgument("stack_fids: columns and output disagree in length");
  for (std::size_t c = 0; c < n; ++c) {
    if (columns[c].size() != rows) {
      throw InvalidArgument("columns[" + std::to_string(c) + "]: expected " + std::to_string(rows) + " ids as in the first, got " +
                            std::to_string(columns[c].size()));
    }
    if (slots[c] >= kFidSlots) {
      throw InvalidArgument("slot: expected 0.." + std::to_string(kFidSlots - 1) + ", got " + std::to_string(slots[c]));
    }
  }
  // Column by column: one slot, and one place to read from, for a whole column; what is written stays in the cache.
  for (std::size_t c = 0; c < n; ++c) {
    const std::int64_t slot = slots[c];
    const std::span<const std::int64_t> ids = columns[c];
    std::int64_t* to = out.data() + c;
    if (slot < 0) {
      for (std::size_t row = 0; row < rows; ++row, to += n) *to = ids[row];
    } else {
      for (std::size_t row = 0; row < rows; ++row, to += n) *to = fid_of(ids[row], slot);
    }
  }
}

}  // namespace monolith
