// Rows are dropped from a batch in place, ids, times and bytes apart. If the three went out of step a row would be saved under
// another id.
#include "row_filter.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"

namespace {

using monolith::RowBatch;

RowBatch batch_of(const std::vector<std::int64_t>& ids, std::size_t row_bytes) {
  RowBatch batch;
  for (const std::int64_t id : ids) {
    batch.ids.push_back(id);
    batch.times.push_back(static_cast<std::uint32_t>(id * 2));
    batch.rows.insert(batch.rows.end(), row_bytes, static_cast<std::byte>(id));
  }
  return batch;
}

bool is_whole(const RowBatch& batch, std::size_t row_bytes) {
  if (batch.times.size() != batch.ids.size() || batch.rows.size() != batch.ids.size() * row_bytes) return false;
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    if (batch.times[i] != static_cast<std::uint32_t>(batch.ids[i] * 2)) return false;
    for (std::size_t b = 0; b < row_bytes; ++b) {
      if (batch.rows[i * row_bytes + b] != static_cast<std::byte>(batch.ids[i])) return false;
    }
  }
  return true;
}

}  // namespace

TEST("kept rows stay together and in order") {
  for (const std::size_t row_bytes : {1, 4, 60}) {
    RowBatch batch = batch_of({1, 2, 3, 4, 5, 6}, row_bytes);
    monolith::filter_rows(row_bytes, batch, 0, [](std::int64_t id, std::uint32_t) { return id % 2 == 0; });
    CHECK(batch.ids == (std::vector<std::int64_t>{2, 4, 6}));
    CHECK(is_whole(batch, row_bytes));
  }
}

TEST("rows before the first one are not asked about") {
  RowBatch batch = batch_of({1, 2, 3, 4}, 8);
  std::vector<std::int64_t> asked;
  monolith::filter_rows(8, batch, 2, [&](std::int64_t id, std::uint32_t) {
    asked.push_back(id);
    return false;
  });
  CHECK(asked == (std::vector<std::int64_t>{3, 4}));
  CHECK(batch.ids == (std::vector<std::int64_t>{1, 2}));
  CHECK(is_whole(batch, 8));
}

TEST("all, none, and nothing at all") {
  RowBatch all = batch_of({1, 2, 3}, 8);
  monolith::filter_rows(8, all, 0, [](std::int64_t, std::uint32_t) { return true; });
  CHECK_EQ(all.ids.size(), 3u);
  CHECK(is_whole(all, 8));
  monolith::filter_rows(8, all, 0, [](std::int64_t, std::uint32_t) { return false; });
  CHECK(all.ids.empty());
  CHECK(is_whole(all, 8));
  monolith::filter_rows(8, all, 0, [](std::int64_t, std::uint32_t) { return false; });
  CHECK(is_whole(all, 8));
}

TEST("the time of a row decides as well as its id") {
  RowBatch batch = batch_of({1, 2, 3}, 4);
  monolith::filter_rows(4, batch, 0, [](std::int64_t, std::uint32_t time) { return time != 4; });
  CHECK(batch.ids == (std::vector<std::int64_t>{1, 3}));
  CHECK(is_whole(batch, 4));
}

TEST("random choices keep exactly what was chosen") {
  std::mt19937 random(2);
  for (int round = 0; round < 500; ++round) {
    std::vector<std::int64_t> ids(random() % 20), expected;
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % 100);
    const std::size_t from = ids.empty() ? 0 : random() % ids.size();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (i < from || ids[i] % 3 != 0) expected.push_back(ids[i]);
    }
    RowBatch batch = batch_of(ids, 12);
    monolith::filter_rows(12, batch, from, [](std::int64_t id, std::uint32_t) { return id % 3 != 0; });
    REQUIRE(batch.ids == expected);
    REQUIRE(is_whole(batch, 12));
  }
}
