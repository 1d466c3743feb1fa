// A row that changes and is in no cut is an update that no checkpoint and no replica ever sees; a cut that shows a row as it became
// after the cut gives a state that never was. Every way to write is tried before and after a cut.
#include <numeric>

#include "change_oracle.h"
#include "check.h"
#include "inverse_hash.h"
#include "monolith/error.h"
#include "tables.h"

using change_oracle::Changes;
using change_oracle::Image;
using Ids = std::vector<std::int64_t>;

namespace {

constexpr std::uint32_t kDim = 4;

struct Tracked {
  explicit Tracked(monolith::TableConfig config = tables::config()) : table(config) { table.track_changes(); }

  void assign(const Ids& ids, float value, std::uint32_t time = 1) {
    const std::vector<float> values(ids.size() * kDim, value);
    table.assign(ids, values.data(), time);
  }
  void train(const Ids& ids, std::uint32_t time = 1) {
    const std::vector<float> grads(ids.size() * kDim, 1.0f);
    const float rate = 1;
    auto options = tables::options(rate);
    options.event_time = time;
    table.apply_gradients(ids, grads.data(), options);
  }
  void erase(const Ids& ids) {
    const auto erased = std::make_unique<bool[]>(ids.size());
    table.erase(ids, erased.get());
  }
  void reinitialize(const Ids& ids, std::uint32_t time = 1) {
    std::vector<std::int32_t> existed(ids.size());
    table.reinitialize(ids, time, existed.data());
  }
  // The state that the cuts so far describe.
  Image replica;
  void cut() { change_oracle::cut_and_commit(table).apply_to(replica); }
  void check_replica() { CHECK(replica == change_oracle::image_of(table)); }

  monolith::Table table;
};

Ids range(std::int64_t first, std::size_t n) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

Ids keys(const Image& image) {
  Ids ids;
  for (const auto& [id, row] : image) ids.push_back(id);
  return ids;
}

// Each way to write, on ids that have rows and on ids that have none.
const std::vector<std::pair<const char*, void (*)(Tracked&, const Ids&)>> kWrites = {
    {"train", [](Tracked& t, const Ids& ids) { t.train(ids, 2); }},
    {"assign", [](Tracked& t, const Ids& ids) { t.assign(ids, 9, 2); }},
    {"assign_add",
     [](Tracked& t, const Ids& ids) {
       const std::vector<float> values(ids.size() * kDim, 1.0f);
       t.table.assign_add(ids, values.data(), 2);
     }},
    {"reinitialize", [](Tracked& t, const Ids& ids) { t.reinitialize(ids, 2); }},
    {"insert_raw",
     [](Tracked& t, const Ids& ids) {
       const std::vector<std::uint32_t> times(ids.size(), 2);
       const std::vector<std::byte> rows(ids.size() * t.table.stats().row_bytes, std::byte{7});
       t.table.insert_raw(ids, times, rows);
     }},
    {"erase", [](Tracked& t, const Ids& ids) { t.erase(ids); }},
    {"evict", [](Tracked& t, const Ids&) { t.table.evict(1000); }},
    {"clear", [](Tracked& t, const Ids&) { t.table.clear(); }},
};

monolith::TableConfig expiring() {
  auto config = tables::config();
  config.default_expiry_seconds = 100;
  return config;
}

}  // namespace

TEST("a cut has what changed since the last one and nothing else") {
  Tracked t;
  t.assign(range(0, 1000), 1);
  t.cut();
  t.check_replica();
  t.train(range(990, 21));
  t.erase({5, 1010});
  CHECK_EQ(t.table.changed(), 22u);
  const Changes changes = change_oracle::cut_and_commit(t.table);
  CHECK(keys(changes.rows) == range(990, 20));
  CHECK(changes.erased == (std::set<std::int64_t>{5, 1010}));
  CHECK_EQ(t.table.changed(), 0u);
  CHECK(change_oracle::cut_and_commit(t.table).rows.empty());
}

TEST("every write is in the next cut") {
  for (const auto& [name, write] : kWrites) {
    Tracked t(expiring());
    t.assign(range(0, 2000), 1);
    t.cut();
    write(t, range(1500, 1000));
    t.cut();
    if (t.replica != change_oracle::image_of(t.table)) check::report(__FILE__, __LINE__, std::string(name) + " was not noticed");
  }
}

TEST("a cut shows rows as they were, whatever is written before it is read") {
  for (const auto& [name, write] : kWrites) {
    Tracked t(expiring());
    t.assign(range(0, 2000), 1);
    const Image then = change_oracle::image_of(t.table);
    const std::uint64_t cut = t.table.cut_changes();
    write(t, range(1500, 1000));
    t.train(range(100, 50));  // after clear, rows with the numbers of others
    const Changes changes = change_oracle::read_all(t.table, cut);
    t.table.commit_changes(cut);
    if (changes.rows != then || !changes.erased.empty()) check::report(__FILE__, __LINE__, std::string(name) + " shows");
    t.replica = changes.rows;
    t.cut();
    t.check_replica();
  }
}

TEST("half read, written, read to the end") {
  Tracked t;
  t.assign(range(0, 60000), 1);
  const Image then = change_oracle::image_of(t.table);
  const std::uint64_t cut = t.table.cut_changes();
  Changes changes;
  monolith::ChangeBatch piece;
  REQUIRE(t.table.read_changes(cut, piece));
  changes.add(piece);
  CHECK(piece.size() < 20000);
  t.train(range(0, 60000), 3);
  while (t.table.read_changes(cut, piece)) changes.add(piece);
  t.table.commit_changes(cut);
  CHECK(changes.rows == then);
  t.replica = changes.rows;
  t.cut();
  t.check_replica();
}

TEST("an id that goes and comes back before the cut is a row, once") {
  Tracked t;
  t.assign({1, 2, 3}, 1);
  t.cut();
  t.erase({1, 2});
  t.assign({2, 1}, 5);
  t.erase({1});
  t.assign({1}, 6);
  const Changes changes = change_oracle::cut_and_commit(t.table);
  CHECK(keys(changes.rows) == (Ids{1, 2}));
  CHECK(changes.erased.empty());
}

TEST("an id that comes back after the cut was removed at the cut") {
  Tracked t;
  t.assign({1, 2, 3}, 1);
  t.cut();
  t.erase({1});
  const std::uint64_t cut = t.table.cut_changes();
  t.assign({1}, 5);
  const Changes changes = change_oracle::read_all(t.table, cut);
  t.table.commit_changes(cut);
  CHECK(changes.rows.empty());
  CHECK(changes.erased == std::set<std::int64_t>{1});
  CHECK(keys(change_oracle::cut_and_commit(t.table).rows) == Ids{1});
}

TEST("a row number that goes to another id of the shard takes no mark with it") {
  // One shard, so that the number is used again.
  const std::int64_t a = id_with_hash(0x11), b = id_with_hash(0x22), c = id_with_hash(0x33);
  Tracked t;
  t.assign({a, b}, 1);
  t.cut();
  t.train({a});
  t.erase({a});
  t.assign({c}, 2);  // has a's number
  Changes changes = change_oracle::cut_and_commit(t.table);
  CHECK(keys(changes.rows) == Ids{c});
  CHECK(changes.erased == std::set<std::int64_t>{a});

  t.train({c});
  const std::uint64_t cut = t.table.cut_changes();
  t.erase({c});
  t.assign({a}, 3);  // has c's number
  changes = change_oracle::read_all(t.table, cut);
  t.table.commit_changes(cut);
  CHECK(keys(changes.rows) == Ids{c});
  CHECK(keys(change_oracle::cut_and_commit(t.table).rows) == Ids{a});
}

TEST("rows written again after clear are noticed, though they have the numbers of rows that were") {
  Tracked t;
  t.assign(range(0, 500), 1);
  t.cut();
  t.train(range(0, 500));
  t.table.clear();
  t.assign(range(100, 300), 2);
  t.cut();
  t.check_replica();
}

TEST("ids refused by the admission filter or skipped as zeros are no changes") {
  auto config = tables::config();
  config.mode = monolith::Mode::kServing;
  config.skip_zero_rows = true;
  Tracked t(config);
  t.assign({1}, 0);
  CHECK_EQ(t.table.changed(), 0u);
  t.assign({1}, 1);
  t.cut();
  t.assign({1}, 0);
  CHECK(change_oracle::cut_and_commit(t.table).erased == std::set<std::int64_t>{1});
}

TEST("a change of nothing but the time is a change") {
  Tracked t;
  t.assign({1}, 1, 10);
  t.cut();
  t.assign({1}, 1, 20);
  t.cut();
  CHECK_EQ(t.replica[1].first, 20u);
}

TEST("tracking starts when asked to, also on a table with rows") {
  monolith::Table table(tables::config());
  const auto ids = range(0, 5000);
  const std::vector<float> values(ids.size() * kDim, 1.0f);
  table.assign(ids, values.data(), 1);
  CHECK_EQ(table.changed(), 0u);
  table.track_changes();
  table.track_changes();
  CHECK_EQ(table.changed(), 0u);
  table.assign(range(10, 3), values.data(), 2);
  CHECK_EQ(table.changed(), 3u);
  CHECK(keys(change_oracle::cut_and_commit(table).rows) == range(10, 3));
}
