// A copy of a table that is built from the pieces of its feed, and the same picture of the table itself.
#pragma once

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "monolith/table.h"

namespace feed_oracle {

struct Copy {
  std::map<std::int64_t, std::pair<std::uint32_t, std::vector<float>>> values;

  bool operator==(const Copy&) const = default;

  void apply(const monolith::FeedBatch& piece) {
    for (const std::int64_t id : piece.erased) values.erase(id);
    const std::size_t dim = piece.ids.empty() ? 0 : piece.values.size() / piece.ids.size();
    for (std::size_t i = 0; i < piece.ids.size(); ++i) {
      const auto first = piece.values.begin() + static_cast<std::ptrdiff_t>(i * dim);
      values[piece.ids[i]] = {piece.times[i], std::vector<float>(first, first + static_cast<std::ptrdiff_t>(dim))};
    }
  }
  // A whole pass. Returns the number of pieces.
  int apply_all(monolith::Table& table) {
    monolith::FeedBatch piece;
    int pieces = 0;
    for (; table.read_feed(piece); ++pieces) apply(piece);
    return pieces;
  }

  static Copy of(const monolith::Table& table) {
    Copy copy;
    monolith::Cursor cursor;
    monolith::RowBatch batch;
    while (table.scan(cursor, batch)) {
      std::vector<float> decoded(batch.ids.size() * table.dim());
      monolith::EntryArrays out{decoded.data(), {}};
      std::vector<std::vector<std::byte>> slots;
      for (const auto& info : table.slot_infos()) {
        slots.emplace_back(batch.ids.size() * info.width * 8);
        out.slots.push_back(slots.back().data());
      }
      table.decode(batch.rows, out);
      monolith::FeedBatch piece{batch.ids, batch.times, decoded, {}};
      copy.apply(piece);
      batch.clear();
    }
    return copy;
  }
};

}  // namespace feed_oracle
