// Saves and exports scan a table that other threads grow. An id that is there throughout must be seen exactly once, however
// its block is split between two steps of the scan.
#include <algorithm>
#include <atomic>
#include <thread>
#include <unordered_map>

#include "check.h"
#include "tables.h"

namespace {

std::unordered_map<std::int64_t, int> scan_all(const monolith::Table& table, const std::function<void()>& between) {
  std::unordered_map<std::int64_t, int> seen;
  monolith::Cursor cursor;
  monolith::RowBatch batch;
  while (table.scan(cursor, batch)) {
    for (const std::int64_t id : batch.ids) ++seen[id];
    batch.clear();
    between();
  }
  return seen;
}

}  // namespace

TEST("growth between the steps of a scan neither hides nor repeats an id") {
  monolith::Table table(tables::config());
  std::vector<std::int64_t> lasting(20000);
  for (std::size_t i = 0; i < lasting.size(); ++i) lasting[i] = static_cast<std::int64_t>(i);
  std::vector<std::int32_t> status(lasting.size());
  table.reinitialize(lasting, 0, status.data());
  std::int64_t next = 1000000;
  const auto seen = scan_all(table, [&] {
    std::vector<std::int64_t> more(500);
    for (auto& id : more) id = next++;
    table.reinitialize(more, 0, status.data());
  });
  for (const std::int64_t id : lasting) REQUIRE(seen.at(id) == 1);
  CHECK(std::all_of(seen.begin(), seen.end(), [](const auto& entry) { return entry.second == 1; }));
}

TEST("a scan beside an inserting and an erasing thread") {
  monolith::Table table(tables::config());
  std::vector<std::int64_t> lasting(5000);
  for (std::size_t i = 0; i < lasting.size(); ++i) lasting[i] = static_cast<std::int64_t>(i);
  std::vector<std::int32_t> status(lasting.size());
  table.reinitialize(lasting, 0, status.data());
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    std::vector<std::int64_t> ids(256);
    std::vector<std::int32_t> local(ids.size());
    bool erased[256];
    for (std::int64_t round = 0; !stop.load() || round < 20; ++round) {
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = 1000000 + round * 256 + static_cast<std::int64_t>(i);
      table.reinitialize(ids, 0, local.data());
      if (round % 2 == 1) table.erase(ids, erased);
      if (round > 400) break;
    }
  });
  for (int round = 0; round < 5; ++round) {
    const auto seen = scan_all(table, [] {});
    for (const std::int64_t id : lasting) REQUIRE(seen.at(id) == 1);
  }
  stop = true;
  writer.join();
}
