// A follower keeps a copy of a table by its feed alone: a change that the feed forgets is served wrong for ever, and a row that was
// removed and is not reported as removed comes back from the dead.
#include "check.h"
#include "feed_oracle.h"
#include "monolith/error.h"
#include "tables.h"

using feed_oracle::Copy;
using Ids = std::vector<std::int64_t>;

namespace {

constexpr std::uint32_t kDim = 4;

void assign(monolith::Table& table, const Ids& ids, float value, std::uint32_t time = 1) {
  const std::vector<float> values(ids.size() * kDim, value);
  table.assign(ids, values.data(), time);
}

void erase(monolith::Table& table, const Ids& ids) {
  const auto erased = std::make_unique<bool[]>(ids.size());
  table.erase(ids, erased.get());
}

}  // namespace

TEST("a feed has what was written since it began, once") {
  monolith::Table table(tables::config());
  assign(table, {1, 2}, 1);
  CHECK_EQ(table.fed(), 0u);
  monolith::FeedBatch piece;
  CHECK_THROWS(table.read_feed(piece), monolith::InvalidArgument);
  table.track_feed();
  assign(table, {2, 3}, 5, 9);
  assign(table, {3}, 6, 10);
  REQUIRE(table.read_feed(piece));
  CHECK((std::set<std::int64_t>(piece.ids.begin(), piece.ids.end()) == std::set<std::int64_t>{2, 3}));
  CHECK_EQ(piece.ids.size(), 2u);
  const std::size_t third = piece.ids[0] == 3 ? 0 : 1;
  CHECK_EQ(piece.values[third * kDim], 6.0f);
  CHECK_EQ(piece.times[third], 10u);
  CHECK(!table.read_feed(piece));
  CHECK_EQ(piece.size(), 0u);
  CHECK(!table.read_feed(piece));
  assign(table, {3}, 7);
  REQUIRE(table.read_feed(piece));
  CHECK(piece.ids == Ids{3});
  table.track_feed();  // a second call changes nothing
  CHECK(!table.read_feed(piece));
}

TEST("a feed is independent of the cuts") {
  monolith::Table table(tables::config());
  table.track_changes();
  table.track_feed();
  assign(table, {1}, 1);
  const auto cut = table.cut_changes();
  Copy copy;
  copy.apply_all(table);
  CHECK_EQ(copy.values.size(), 1u);
  monolith::ChangeBatch piece;
  REQUIRE(table.read_changes(cut, piece));
  CHECK(piece.rows.ids == Ids{1});
  table.rollback_changes(cut);
  monolith::FeedBatch fed;
  CHECK(!table.read_feed(fed));
}

TEST("removed ids are reported until they come back") {
  monolith::Table table(tables::config());
  table.track_feed();
  assign(table, {1, 2, 3}, 1);
  Copy copy;
  copy.apply_all(table);
  erase(table, {1, 2});
  assign(table, {2}, 4);
  monolith::FeedBatch piece;
  REQUIRE(table.read_feed(piece));
  CHECK(piece.erased == Ids{1});
  CHECK(piece.ids == Ids{2});
  copy.apply(piece);
  CHECK(!table.read_feed(piece));
  // The row of a removed id goes to another one, which must not inherit its mark.
  assign(table, {3}, 8);
  erase(table, {3});
  assign(table, {4, 5}, 9);
  copy.apply_all(table);
  CHECK(copy == Copy::of(table));
  table.clear();
  copy.apply_all(table);
  CHECK(copy.values.empty());
  assign(table, {1}, 2);
  copy.apply_all(table);
  CHECK(copy == Copy::of(table));
}

TEST("gradients, evictions and new rows are in the feed") {
  auto config = tables::config(monolith::OptimizerKind::kAdagrad, kDim);
  config.default_expiry_seconds = 100;
  monolith::Table table(config);
  table.track_feed();
  Ids ids(100'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7919);
  const std::vector<float> grads(ids.size() * kDim, 0.5f);
  const float rate = 1;
  auto options = tables::options(rate);
  options.event_time = 50;
  table.apply_gradients(ids, grads.data(), options);
  Copy copy;
  copy.apply_all(table);
  CHECK(copy == Copy::of(table));
  options.event_time = 1000;
  const Ids few(ids.begin(), ids.begin() + 10'000);
  table.apply_gradients(few, grads.data(), options);
  CHECK_EQ(table.fed(), 10'000u);
  CHECK_EQ(table.evict(1000), 90'000u);
  copy.apply_all(table);
  CHECK_EQ(copy.values.size(), 10'000u);
  CHECK(copy == Copy::of(table));
}

TEST("a feed of many bytes comes in pieces") {
  constexpr std::uint32_t kWide = 256;
  monolith::Table table(tables::config(monolith::OptimizerKind::kAdagrad, kWide));
  table.track_feed();
  Ids ids(20'000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * 7919);
  const std::vector<float> values(ids.size() * kWide, 2.0f);
  table.assign(ids, values.data(), 1);
  Copy copy;
  CHECK(copy.apply_all(table) >= 3);
  CHECK(copy == Copy::of(table));
}
