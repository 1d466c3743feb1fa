// Memory may run out while a write notes what it changes. The feed must still have every change that was made.
#include "check.h"
#include "failing_new.h"
#include "feed_oracle.h"
#include "inverse_hash.h"
#include "monolith/thread_pool.h"
#include "tables.h"

using Ids = std::vector<std::int64_t>;

namespace {

constexpr std::uint32_t kDim = 4;

// Of eight shards: enough to have several, few enough that every allocation can fail.
Ids range(std::uint64_t first, std::size_t n) {
  Ids ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = id_with_hash((first + i) * 0x9E3779B97F4A7C15ull >> 4);
  return ids;
}

struct State {
  monolith::Table table{tables::config()};
  feed_oracle::Copy copy;

  State() {
    const Ids old = range(0, 900);
    const std::vector<float> values(old.size() * kDim, 1.0f);
    table.track_changes();
    table.track_feed();
    table.assign(old, values.data(), 1);
    copy.apply_all(table);
    table.assign(range(0, 300), values.data(), 2);
  }
};

template <typename Act>
void check_write(Act act, std::int64_t at_least) {
  monolith::set_num_threads(1);
  const auto failed = failing_new::each_allocation([] { return std::make_unique<State>(); },
                                                   [&](auto& state) { act(state->table); },
                                                   [](auto& state) {
                                                     state->copy.apply_all(state->table);
                                                     REQUIRE(state->copy == feed_oracle::Copy::of(state->table));
                                                   });
  CHECK(failed >= at_least);
}

}  // namespace

TEST("a feed after writes under failing allocations") {
  const Ids some = range(200, 900);  // old ids, some of them waiting, and new ones
  const std::vector<float> values(some.size() * kDim, 5.0f);
  const auto erased = std::make_unique<bool[]>(some.size());
  const float rate = 1;
  check_write([&](auto& table) { table.apply_gradients(some, values.data(), tables::options(rate)); }, 15);
  check_write([&](auto& table) { table.assign(some, values.data(), 3); }, 15);
  check_write([&](auto& table) { table.erase(some, erased.get()); }, 10);
  check_write([&](auto& table) { table.clear(); }, 10);
}
