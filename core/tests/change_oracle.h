// Two pictures of a table that tests of its change log compare: all of it now, and a replica built from the pieces of cuts.
#pragma once

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "check.h"
#include "monolith/table.h"

namespace change_oracle {

// id -> (time, bytes of the row)
using Image = std::map<std::int64_t, std::pair<std::uint32_t, std::string>>;

inline void put(Image& image, const monolith::RowBatch& batch) {
  if (batch.ids.empty()) return;
  const std::size_t row_bytes = batch.rows.size() / batch.ids.size();
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    const char* const row = reinterpret_cast<const char*>(batch.rows.data() + i * row_bytes);
    image[batch.ids[i]] = {batch.times[i], std::string(row, row_bytes)};
  }
}

inline Image image_of(const monolith::Table& table) {
  Image image;
  monolith::Cursor cursor;
  monolith::RowBatch batch;
  while (table.scan(cursor, batch)) {
    put(image, batch);
    batch.clear();
  }
  return image;
}

// What one cut brought. Each id comes at most once, as a row or as removed.
struct Changes {
  Image rows;
  std::set<std::int64_t> erased;

  void add(const monolith::ChangeBatch& piece) {
    const std::size_t before = rows.size() + erased.size();
    put(rows, piece.rows);
    erased.insert(piece.erased.begin(), piece.erased.end());
    CHECK_EQ(rows.size() + erased.size(), before + piece.size());
    for (const std::int64_t id : piece.erased) CHECK(!rows.contains(id));
    for (const std::int64_t id : piece.rows.ids) CHECK(!erased.contains(id));
  }
  void apply_to(Image& replica) const {
    for (const auto& [id, row] : rows) replica[id] = row;
    for (const std::int64_t id : erased) replica.erase(id);
  }
};

inline Changes read_all(monolith::Table& table, std::uint64_t cut) {
  Changes changes;
  monolith::ChangeBatch piece;
  while (table.read_changes(cut, piece)) changes.add(piece);
  return changes;
}

inline Changes cut_and_commit(monolith::Table& table) {
  const std::uint64_t cut = table.cut_changes();
  const Changes changes = read_all(table, cut);
  table.commit_changes(cut);
  return changes;
}

}  // namespace change_oracle
