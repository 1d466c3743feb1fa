// Many threads put ids into one set. Counts must be exact when they have finished: they decide when a set is full and forgets.
#include "striped_id_set.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "failing_new.h"

namespace {

using monolith::StripedIdSet;
using Ids = std::vector<std::int64_t>;

Ids sorted(const StripedIdSet& set) {
  Ids ids(set.size() + 1);
  set.copy_to(ids.data());
  ids.pop_back();
  std::sort(ids.begin(), ids.end());
  return ids;
}

Ids numbers(std::int64_t first, std::int64_t last) {
  Ids ids;
  for (std::int64_t id = first; id < last; ++id) ids.push_back(id);
  return ids;
}

}  // namespace

TEST("batches of every size are counted, duplicates once") {
  for (const std::uint32_t stripes : {1u, 4u, 64u}) {
    StripedIdSet set(stripes);
    std::size_t fresh = 0;
    set.insert({}, fresh);
    CHECK_EQ(fresh, 0u);
    const Ids few = {5, -5, 5, 0, 0, 7};
    set.insert(few, fresh);
    CHECK_EQ(fresh, 4u);
    CHECK_EQ(set.size(), 4u);
    CHECK(sorted(set) == (Ids{-5, 0, 5, 7}));
    // More than is grouped at a time, twice.
    const Ids many = numbers(-20000, 20000);
    fresh = 0;
    set.insert(many, fresh);
    CHECK_EQ(fresh, many.size() - 4);
    fresh = 0;
    set.insert(many, fresh);
    CHECK_EQ(fresh, 0u);
    CHECK(sorted(set) == many);
  }
}

TEST("one id at a time is the same") {
  StripedIdSet set(16);
  for (std::int64_t id = 0; id < 500; ++id) CHECK(set.insert_alone(id * 3));
  for (std::int64_t id = 0; id < 500; ++id) CHECK(!set.insert_alone(id * 3));
  CHECK_EQ(set.size(), 500u);
  std::size_t fresh = 0;
  set.insert(numbers(0, 1500), fresh);
  CHECK_EQ(fresh, 1000u);
}

TEST("a set like another has room for as many") {
  StripedIdSet first(8);
  std::size_t fresh = 0;
  const Ids ids = numbers(1, 5000);
  first.insert(ids, fresh);
  StripedIdSet second(8, &first);
  CHECK_EQ(second.size(), 0u);
  second.insert(ids, fresh);
  const std::size_t bytes = second.bytes();
  CHECK(sorted(second) == ids);
  CHECK(bytes <= first.bytes() * 2);
}

TEST("clearing forgets everything") {
  StripedIdSet set(8);
  std::size_t fresh = 0;
  set.insert(numbers(-100, 100), fresh);
  set.clear();
  CHECK_EQ(set.size(), 0u);
  CHECK(sorted(set).empty());
  fresh = 0;
  set.insert(numbers(-100, 100), fresh);
  CHECK_EQ(fresh, 200u);
}

TEST("threads that insert the same ids count each once") {
  StripedIdSet set(16);
  std::vector<std::thread> threads;
  std::vector<std::size_t> fresh(4);
  const Ids all = numbers(0, 30000);
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      Ids mine = all;
      std::shuffle(mine.begin(), mine.end(), random);
      for (std::size_t at = 0; at < mine.size();) {
        const std::size_t n = std::min<std::size_t>(1 + random() % 700, mine.size() - at);
        set.insert(std::span(mine).subspan(at, n), fresh[t]);
        at += n;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(fresh[0] + fresh[1] + fresh[2] + fresh[3], all.size());
  CHECK_EQ(set.size(), all.size());
  CHECK(sorted(set) == all);
}

TEST("what was inserted before memory ran out is counted") {
  const Ids ids = numbers(1, 400);
  struct State {
    StripedIdSet set{4};
    std::size_t fresh = 0;
  };
  const auto failures = failing_new::each_allocation(
      [] { return std::make_unique<State>(); }, [&](auto& state) { state->set.insert(ids, state->fresh); },
      [&](auto& state) {
        REQUIRE(state->set.size() == state->fresh);
        REQUIRE(sorted(state->set).size() == state->fresh);
        state->set.insert(ids, state->fresh);
        REQUIRE(state->fresh == ids.size());
        REQUIRE(sorted(state->set) == ids);
      });
  CHECK(failures > 4);
}
