// The change log reads this set: an id that leaves it before its row is durable is an update that serving and restore never see.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/touched_set.h"

using monolith::ChangedIdSet;
using Ids = std::vector<std::int64_t>;

namespace {

Ids sorted(Ids ids) {
  std::sort(ids.begin(), ids.end());
  return ids;
}

Ids content(const ChangedIdSet::Batch& batch) { return sorted(*batch); }

}  // namespace

TEST("commit forgets what was in flight; ids inserted meanwhile wait for the next steal") {
  ChangedIdSet set;
  set.insert(Ids{1, 2, 3, 2});
  CHECK(content(set.steal()) == (Ids{1, 2, 3}));
  CHECK_EQ(set.size(), 0u);
  CHECK_EQ(set.in_flight(), 3u);
  set.insert(Ids{3, 4});
  CHECK_EQ(set.size(), 2u);
  set.commit();
  CHECK_EQ(set.in_flight(), 0u);
  CHECK(content(set.steal()) == (Ids{3, 4}));
}

TEST("rollback merges what was in flight with what came since") {
  ChangedIdSet set;
  set.insert(Ids{1, 2, 3});
  set.steal();
  set.insert(Ids{3, 4});
  set.rollback();
  CHECK_EQ(set.in_flight(), 0u);
  CHECK(content(set.steal()) == (Ids{1, 2, 3, 4}));
}

TEST("a batch stays readable after commit, and changing the set does not change it") {
  ChangedIdSet set;
  set.insert(Ids{1, 2});
  const auto batch = set.steal();
  set.insert(Ids{9});
  set.commit();
  CHECK(content(batch) == (Ids{1, 2}));
}

TEST("calls out of order are refused and change nothing") {
  ChangedIdSet set;
  CHECK_THROWS(set.commit(), monolith::InvalidArgument);
  CHECK_THROWS(set.rollback(), monolith::InvalidArgument);
  set.insert(Ids{1});
  set.steal();
  set.insert(Ids{2});
  CHECK_THROWS(set.steal(), monolith::InvalidArgument);
  CHECK_EQ(set.size(), 1u);
  CHECK_EQ(set.in_flight(), 1u);
  set.commit();
  CHECK_THROWS(set.commit(), monolith::InvalidArgument);
}

TEST("an empty steal is a flight too") {
  ChangedIdSet set;
  CHECK(set.steal()->empty());
  CHECK_THROWS(set.steal(), monolith::InvalidArgument);
  set.rollback();
  CHECK(set.steal()->empty());
}

TEST("a million ids stay, and commit gives their memory back") {
  ChangedIdSet set;
  Ids ids(1 << 20);
  std::iota(ids.begin(), ids.end(), -(1 << 19));
  set.insert(ids);
  set.insert(ids);
  CHECK_EQ(set.size(), ids.size());
  CHECK(content(set.steal()) == ids);
  const std::size_t flying = set.bytes();
  set.commit();
  CHECK(set.bytes() < flying);
}

TEST("random calls agree with two plain sets") {
  std::mt19937_64 random(5);
  ChangedIdSet set;
  std::set<std::int64_t> waiting;
  std::set<std::int64_t> flight;
  bool flying = false;
  for (int step = 0; step < 3000; ++step) {
    switch (random() % 4) {
      case 0:
      case 1: {
        Ids ids(random() % 400);
        for (auto& id : ids) id = static_cast<std::int64_t>(random() % 5000) - 2500;
        set.insert(ids);
        waiting.insert(ids.begin(), ids.end());
        break;
      }
      case 2:
        if (flying) break;
        CHECK(content(set.steal()) == Ids(waiting.begin(), waiting.end()));
        flight = std::move(waiting);
        waiting.clear();
        flying = true;
        break;
      default:
        if (!flying) break;
        if (random() % 2 == 0) {
          set.commit();
        } else {
          set.rollback();
          waiting.insert(flight.begin(), flight.end());
        }
        flight.clear();
        flying = false;
    }
    CHECK_EQ(set.size(), waiting.size());
    CHECK_EQ(set.in_flight(), flight.size());
  }
}
