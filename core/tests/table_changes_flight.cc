// A cut that could not be stored must come again, and a cut must not be forgotten before it was read: either is a lost update.
#include <numeric>

#include "change_oracle.h"
#include "check.h"
#include "monolith/error.h"
#include "tables.h"

using change_oracle::Changes;
using change_oracle::Image;
using Ids = std::vector<std::int64_t>;

namespace {

constexpr std::uint32_t kDim = 4;

void assign(monolith::Table& table, const Ids& ids, float value) {
  const std::vector<float> values(ids.size() * kDim, value);
  table.assign(ids, values.data(), 1);
}

void erase(monolith::Table& table, const Ids& ids) {
  const auto erased = std::make_unique<bool[]>(ids.size());
  table.erase(ids, erased.get());
}

Ids range(std::int64_t first, std::size_t n) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

// Rows 0..99 with value 1, everything committed; then 0..9 changed, 10..19 removed, 20..29 removed and put back.
struct Ready {
  monolith::Table table{tables::config()};
  Image replica;
  Ready() {
    table.track_changes();
    assign(table, range(0, 100), 1);
    change_oracle::cut_and_commit(table).apply_to(replica);
    assign(table, range(0, 10), 2);
    erase(table, range(10, 20));
    assign(table, range(20, 10), 3);
  }
  void check() {
    change_oracle::cut_and_commit(table).apply_to(replica);
    CHECK(replica == change_oracle::image_of(table));
  }
};

}  // namespace

TEST("rolled back unread") {
  Ready r;
  r.table.rollback_changes(r.table.cut_changes());
  CHECK(r.table.changed() >= 30);
  r.check();
}

TEST("rolled back after it was read") {
  Ready r;
  const std::uint64_t cut = r.table.cut_changes();
  change_oracle::read_all(r.table, cut);
  r.table.rollback_changes(cut);
  r.check();
}

TEST("rolled back after everything changed again") {
  for (const bool read : {false, true}) {
    Ready r;
    const std::uint64_t cut = r.table.cut_changes();
    if (read) change_oracle::read_all(r.table, cut);
    erase(r.table, range(0, 5));
    assign(r.table, range(10, 5), 7);
    assign(r.table, range(5, 2), 8);
    erase(r.table, {20});
    r.table.rollback_changes(cut);
    r.check();
  }
}

TEST("rolled back after clear") {
  Ready r;
  const std::uint64_t cut = r.table.cut_changes();
  r.table.clear();
  assign(r.table, range(3, 4), 9);
  r.table.rollback_changes(cut);
  r.check();
}

TEST("a cut that was rolled back leaves nothing in flight") {
  Ready r;
  r.table.rollback_changes(r.table.cut_changes());
  const std::uint64_t cut = r.table.cut_changes();
  const Image then = change_oracle::image_of(r.table);
  assign(r.table, range(0, 100), 50);
  change_oracle::read_all(r.table, cut).apply_to(r.replica);
  CHECK(r.replica == then);
  r.table.commit_changes(cut);
  r.check();
}

TEST("calls out of order are refused and change nothing") {
  monolith::Table plain(tables::config());
  CHECK_THROWS(plain.cut_changes(), monolith::InvalidArgument);
  Ready r;
  monolith::ChangeBatch piece;
  CHECK_THROWS(r.table.read_changes(1, piece), monolith::InvalidArgument);
  const std::uint64_t cut = r.table.cut_changes();
  CHECK_THROWS(r.table.cut_changes(), monolith::InvalidArgument);
  CHECK_THROWS(r.table.commit_changes(cut), monolith::InvalidArgument);  // not read
  CHECK_THROWS(r.table.commit_changes(cut - 1), monolith::InvalidArgument);
  CHECK_THROWS(r.table.rollback_changes(cut + 1), monolith::InvalidArgument);
  change_oracle::read_all(r.table, cut).apply_to(r.replica);
  r.table.commit_changes(cut);
  CHECK_THROWS(r.table.commit_changes(cut), monolith::InvalidArgument);
  CHECK_THROWS(r.table.rollback_changes(cut), monolith::InvalidArgument);
  r.check();
}

TEST("an empty cut needs no reading") {
  monolith::Table table(tables::config());
  table.track_changes();
  table.commit_changes(table.cut_changes());
  table.rollback_changes(table.cut_changes());
}

TEST("commit gives the memory of removed ids and copies back") {
  Ready r;
  assign(r.table, range(1000, 50000), 1);
  r.check();
  const std::uint64_t before = r.table.stats().bytes;
  for (int i = 0; i < 5; ++i) {
    erase(r.table, range(1000, 50000));
    assign(r.table, range(1000, 50000), 1);
    const std::uint64_t cut = r.table.cut_changes();
    assign(r.table, range(1000, 50000), 2);
    change_oracle::read_all(r.table, cut).apply_to(r.replica);
    r.table.commit_changes(cut);
    r.check();
  }
  CHECK(r.table.stats().bytes < before + 3 * 50000 * sizeof(std::int64_t));
}
