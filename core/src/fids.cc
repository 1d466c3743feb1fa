#include "monolith/fids.h"

#include <string>

#include "monolith/error.h"

namespace monolith {
namespace {

void check_slot(std::int64_t slot) {
  if (slot < kFidSlots) return;
  throw InvalidArgument("slot: expected 0.." + std::to_string(kFidSlots - 1) + ", got " + std::to_string(slot));
}

}  // namespace

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
    check_slot(slots[c]);
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

void put_slots(std::span<std::int64_t> ids, std::size_t columns, std::span<const std::int64_t> slots, bool by_row) {
  const std::size_t rows = columns == 0 ? 0 : ids.size() / columns;
  if (ids.size() != rows * columns) throw InvalidArgument("ids: expected whole rows of " + std::to_string(columns));
  if (slots.size() != (by_row ? rows : columns) && !ids.empty()) {
    throw InvalidArgument("slots: expected " + std::to_string(by_row ? rows : columns) + ", got " + std::to_string(slots.size()));
  }
  for (const std::int64_t slot : slots) check_slot(slot);
  for (std::size_t row = 0; row < rows; ++row) {
    std::int64_t* const at = ids.data() + row * columns;
    for (std::size_t c = 0; c < columns; ++c) {
      const std::int64_t slot = slots[by_row ? row : c];
      if (slot >= 0) at[c] = fid_of(at[c], slot);
    }
  }
}

}  // namespace monolith
