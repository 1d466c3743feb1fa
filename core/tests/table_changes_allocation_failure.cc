// Memory may run out in any call: while a write notes a change, while it saves a row of a cut, while a cut is read or rolled back.
// Whatever happens, no change may be lost.
#include "change_oracle.h"
#include "check.h"
#include "failing_new.h"
#include "inverse_hash.h"
#include "monolith/error.h"
#include "monolith/thread_pool.h"
#include "tables.h"

using change_oracle::Changes;
using change_oracle::Image;
using Ids = std::vector<std::int64_t>;

namespace {

constexpr std::uint32_t kDim = 4;

// Of eight shards: enough to have several, few enough that every allocation can fail.
Ids range(std::uint64_t first, std::size_t n) {
  Ids ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = id_with_hash((first + i) * 0x9E3779B97F4A7C15ull >> 4);
  return ids;
}

const Ids kOld = range(0, 900);
const Ids kNew = range(600, 900);  // a third of the old ids, and new ones

monolith::TableConfig config() {
  auto config = tables::config();
  config.default_expiry_seconds = 1000;
  return config;
}

// Rows that are committed, rows and removals that are in the cut under way, and their images at both moments.
struct State {
  monolith::Table table{config()};
  Image replica, then;
  std::uint64_t cut;

  State() {
    std::vector<float> values(kOld.size() * kDim, 1.0f);
    table.track_changes();
    table.assign(kOld, values.data(), 1);
    change_oracle::cut_and_commit(table).apply_to(replica);
    table.assign(kOld, values.data(), 2);
    const auto erased = std::make_unique<bool[]>(100);
    table.erase(range(0, 100), erased.get());
    then = change_oracle::image_of(table);
    cut = table.cut_changes();
  }
  // The cut shows what was there when it was made, and the next cut everything since.
  void check_both_cuts() {
    change_oracle::read_all(table, cut).apply_to(replica);
    REQUIRE(replica == then);
    table.commit_changes(cut);
    check_next_cut();
  }
  void check_next_cut() {
    change_oracle::cut_and_commit(table).apply_to(replica);
    REQUIRE(replica == change_oracle::image_of(table));
  }
};

std::unique_ptr<State> make() { return std::make_unique<State>(); }

template <typename Act>
void check_write(Act act, std::int64_t at_least) {
  monolith::set_num_threads(1);
  const auto failed = failing_new::each_allocation(
      make, [&](auto& state) { act(state->table); }, [](auto& state) { state->check_both_cuts(); });
  CHECK(failed >= at_least);
}

}  // namespace

TEST("training under failing allocations, beside an unread cut") {
  const std::vector<float> grads(kNew.size() * kDim, 1.0f);
  const float rate = 1;
  check_write([&](auto& table) { table.apply_gradients(kNew, grads.data(), tables::options(rate)); }, 20);
}

TEST("assigning under failing allocations, beside an unread cut") {
  const std::vector<float> values(kNew.size() * kDim, 5.0f);
  check_write([&](auto& table) { table.assign(kNew, values.data(), 3); }, 20);
}

TEST("erasing under failing allocations, beside an unread cut") {
  const auto erased = std::make_unique<bool[]>(kNew.size());
  check_write([&](auto& table) { table.erase(kNew, erased.get()); }, 10);
}

TEST("evicting under failing allocations, beside an unread cut") {
  check_write([&](auto& table) { table.evict(3000); }, 10);
}

TEST("clearing under failing allocations, beside an unread cut") {
  check_write([&](auto& table) { table.clear(); }, 100);
}

TEST("a piece lost to a failing allocation comes again after rollback") {
  const auto failed = failing_new::each_allocation(
      make,
      [](auto& state) {
        monolith::ChangeBatch piece;
        while (state->table.read_changes(state->cut, piece)) {
        }
      },
      [](auto& state) {
        monolith::ChangeBatch piece;
        CHECK_THROWS(state->table.read_changes(state->cut, piece), monolith::InvalidArgument);
        CHECK_THROWS(state->table.commit_changes(state->cut), monolith::InvalidArgument);
        state->table.rollback_changes(state->cut);
        state->check_next_cut();
      });
  CHECK(failed > 3);
}

TEST("rollback under failing allocations is called again") {
  const auto failed = failing_new::each_allocation(
      make, [](auto& state) { state->table.rollback_changes(state->cut); },
      [](auto& state) {
        state->table.rollback_changes(state->cut);
        state->check_next_cut();
      });
  CHECK(failed > 4);
}

TEST("a cut allocates nothing, and tracking starts in all shards or in none") {
  {
    State state;
    state.check_both_cuts();
    const failing_new::FailFrom fail(0);
    static_cast<void>(state.table.cut_changes());
  }
  const auto failed = failing_new::each_allocation(
      [] { return std::make_unique<monolith::Table>(tables::config()); }, [](auto& table) { table->track_changes(); },
      [](auto& table) {
        CHECK_THROWS(table->cut_changes(), monolith::InvalidArgument);
        const std::vector<float> values(kOld.size() * kDim, 1.0f);
        table->assign(kOld, values.data(), 1);
        CHECK_EQ(table->changed(), 0u);
      });
  CHECK(failed > 100);
}
