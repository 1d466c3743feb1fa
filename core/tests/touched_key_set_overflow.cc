// The overflow rule is exact: a replay of a stream must see the same numbers of dropped ids, and the same ids left, as the
// original would (without its lost keys).
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/touched_set.h"

using monolith::TouchedKeySet;
using Ids = std::vector<std::int64_t>;

namespace {

Ids range(std::int64_t begin, std::int64_t end) {
  Ids ids(end - begin);
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

Ids sorted(Ids ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

TEST("spec: 0..999 into capacity 1000 drops nothing") {
  TouchedKeySet set(1000, 1);
  CHECK_EQ(set.insert(range(0, 1000)), 0u);
  CHECK(sorted(set.steal()) == range(0, 1000));
  CHECK(set.steal().empty());
}

TEST("spec: 0..1004 into capacity 1000 drops 1001 and leaves 1001..1004") {
  TouchedKeySet set(1000, 1);
  CHECK_EQ(set.insert(range(0, 1005)), 1001u);
  CHECK(sorted(set.steal()) == range(1001, 1005));
}

TEST("an id that is already in the set also clears a set that is over capacity") {
  TouchedKeySet set(3, 1);
  CHECK_EQ(set.insert(Ids{1, 2, 3, 4}), 0u);
  CHECK_EQ(set.size(), 4u);
  CHECK_EQ(set.insert(Ids{2}), 4u);
  CHECK(set.steal() == Ids{2});
}

TEST("duplicates neither grow the set nor drop anything") {
  TouchedKeySet set(3, 4);
  for (int i = 0; i < 100; ++i) CHECK_EQ(set.insert(Ids{7, 7, 8}), 0u);
  CHECK_EQ(set.size(), 2u);
}

TEST("any number of stripes and any batch size give what the rule says") {
  std::mt19937_64 random(11);
  for (const std::int64_t level : {1, 2, 3, 64, 1024}) {
    for (const std::int64_t capacity : {1, 5, 1000, 40000}) {
      TouchedKeySet set(capacity, level);
      std::set<std::int64_t> model;
      for (int round = 0; round < 30; ++round) {
        Ids ids(random() % (round % 3 == 0 ? 50000 : 300));
        for (auto& id : ids) id = static_cast<std::int64_t>(random() % (3 * capacity)) - capacity;
        std::uint64_t expected = 0;
        for (const std::int64_t id : ids) {
          if (model.size() > static_cast<std::size_t>(capacity)) {
            expected += model.size();
            model.clear();
          }
          model.insert(id);
        }
        CHECK_EQ(set.insert(ids), expected);
        CHECK_EQ(set.size(), model.size());
        if (round % 7 != 6) continue;
        CHECK(sorted(set.steal()) == Ids(model.begin(), model.end()));
        model.clear();
      }
    }
  }
}

TEST("the extremes of int64 and the id that marks a free slot inside are ids like any other") {
  const Ids ids{INT64_MIN, -1, 0, 1, INT64_MAX};
  TouchedKeySet set(10, 2);
  for (int i = 0; i < 3; ++i) CHECK_EQ(set.insert(ids), 0u);
  CHECK_EQ(set.size(), 5u);
  CHECK(sorted(set.steal()) == ids);
}

TEST("memory for ids is taken by the first insert, not by the constructor") {
  TouchedKeySet set;
  const std::size_t empty = set.bytes();
  CHECK(empty < 1u << 18);
  set.insert(range(0, 100000));
  CHECK(set.bytes() >= empty + 800000);
}

TEST("stripes are the concurrency level rounded up to a power of two; impossible arguments are refused") {
  CHECK_EQ(TouchedKeySet(10, 1).stripes(), 1u);
  CHECK_EQ(TouchedKeySet(10, 3).stripes(), 4u);
  CHECK_EQ(TouchedKeySet().stripes(), 1024u);
  CHECK_EQ(TouchedKeySet().capacity(), 2097152u);
  for (const std::int64_t wrong : {std::int64_t{-1}, std::int64_t{0}, INT64_MAX}) {
    CHECK_THROWS(TouchedKeySet(wrong, 1), monolith::InvalidArgument);
    CHECK_THROWS(TouchedKeySet(10, wrong), monolith::InvalidArgument);
  }
}
