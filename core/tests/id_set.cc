// The set behind touched keys. An id that is forgotten is an update that is never exported, and one that is kept twice makes
// counts lie.
#include "id_set.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "inverse_hash.h"

namespace {

using monolith::hash_id;
using monolith::IdSet;

std::vector<std::int64_t> sorted(const IdSet& set) {
  std::vector<std::int64_t> ids(set.size() + 1);
  const std::int64_t* const end = set.copy_to(ids.data());
  REQUIRE(end == ids.data() + set.size());
  ids.pop_back();
  std::sort(ids.begin(), ids.end());
  return ids;
}

bool insert(IdSet& set, std::int64_t id) { return set.insert(id, hash_id(id)); }

}  // namespace

TEST("a set holds what was put in, once") {
  std::mt19937_64 random(1);
  for (const std::int64_t range : {10, 1000, 100000}) {
    IdSet set;
    std::set<std::int64_t> expected;
    for (int i = 0; i < 5000; ++i) {
      const auto id = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(range)) - range / 2;
      REQUIRE(insert(set, id) == expected.insert(id).second);
      REQUIRE(set.size() == expected.size());
    }
    CHECK(sorted(set) == std::vector<std::int64_t>(expected.begin(), expected.end()));
  }
}

TEST("the id that marks a free slot is an id like others") {
  IdSet set;
  CHECK(insert(set, 0));
  CHECK(!insert(set, 0));
  CHECK_EQ(set.size(), 1u);
  CHECK_EQ(set.bytes(), 0u);  // it needs no slot
  CHECK(sorted(set) == std::vector<std::int64_t>{0});
  CHECK(insert(set, 5));
  CHECK(sorted(set) == (std::vector<std::int64_t>{0, 5}));
  set.clear();
  CHECK_EQ(set.size(), 0u);
  CHECK(insert(set, 0));
}

TEST("ids that share a home slot are told apart") {
  IdSet set;
  std::vector<std::int64_t> same;
  for (std::uint64_t i = 1; i <= 40; ++i) same.push_back(id_with_hash(i << 40 | 3));
  for (const std::int64_t id : same) CHECK(insert(set, id));
  for (const std::int64_t id : same) CHECK(!insert(set, id));
  std::sort(same.begin(), same.end());
  CHECK(sorted(set) == same);
}

TEST("clearing forgets ids and keeps memory") {
  IdSet set;
  for (std::int64_t id = 1; id < 1000; ++id) insert(set, id);
  const std::size_t bytes = set.bytes();
  set.clear();
  CHECK_EQ(set.size(), 0u);
  CHECK_EQ(set.bytes(), bytes);
  CHECK(sorted(set).empty());
  for (std::int64_t id = 1; id < 1000; ++id) CHECK(insert(set, id));
  CHECK_EQ(set.bytes(), bytes);
}

TEST("room that was asked for is enough, and is taken with the first id") {
  for (const std::size_t expected : {1, 5, 6, 7, 100, 4097}) {
    IdSet set(expected);
    CHECK_EQ(set.bytes(), 0u);
    insert(set, 1);
    const std::size_t bytes = set.bytes();
    CHECK(bytes >= expected * sizeof(std::int64_t));
    for (std::size_t id = 2; id <= expected; ++id) insert(set, static_cast<std::int64_t>(id));
    CHECK_EQ(set.bytes(), bytes);
  }
}

TEST("reserving keeps what is there") {
  IdSet set;
  for (std::int64_t id = -50; id < 50; ++id) insert(set, id);
  const auto before = sorted(set);
  set.reserve(10000);
  CHECK(set.bytes() >= 10000 * sizeof(std::int64_t));
  CHECK(sorted(set) == before);
  set.reserve(10);  // never shrinks
  CHECK(set.bytes() >= 10000 * sizeof(std::int64_t));
}

TEST("a set that cannot grow is unchanged") {
  const auto make = [] {
    auto set = std::make_unique<IdSet>();
    for (std::int64_t id = 1; id <= 6; ++id) insert(*set, id);  // three quarters of the first slots
    return set;
  };
  const auto failures = failing_new::each_allocation(
      make, [](auto& set) { insert(*set, 7); },
      [](auto& set) {
        CHECK_EQ(set->size(), 6u);
        CHECK(sorted(*set) == (std::vector<std::int64_t>{1, 2, 3, 4, 5, 6}));
        CHECK(!insert(*set, 6));
        CHECK(insert(*set, 7));
      });
  CHECK(failures > 0);
}
