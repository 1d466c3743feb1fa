// Running out of memory in the middle of a batch must not lose ids that were already recorded.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "check.h"
#include "failing_new.h"
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

TEST("construction: a failed allocation throws and leaks nothing") {
  const auto failures = failing_new::each_allocation([] { return 0; }, [](int) { TouchedKeySet set(100, 8); }, [](int) {});
  CHECK(failures >= 2);
}

TEST("insert: ids from before stay, nothing foreign appears, the size stays true, and inserting again completes it") {
  for (const std::int64_t level : {1, 16}) {
    const Ids more = range(100, 400);
    const auto failures = failing_new::each_allocation(
        [&] {
          auto set = std::make_unique<TouchedKeySet>(10000, level);
          set->insert(range(0, 100));
          return set;
        },
        [&](auto& set) { set->insert(more); },
        [&](auto& set) {
          const std::size_t size = set->size();
          CHECK(size >= 100 && size <= 400);
          CHECK_EQ(set->insert(more), 0u);
          CHECK_EQ(set->size(), 400u);
          CHECK(sorted(set->steal()) == range(0, 400));
        });
    CHECK(failures >= 2);
  }
}

TEST("insert: a failure gives back the room it had claimed, so the overflow rule stays exact") {
  const auto failures = failing_new::each_allocation(
      [] { return std::make_unique<TouchedKeySet>(1000, 4); }, [](auto& set) { set->insert(range(0, 900)); },
      [](auto& set) {
        CHECK_EQ(set->insert(range(0, 1001)), 0u);
        CHECK_EQ(set->insert(Ids{5000}), 1001u);
        CHECK_EQ(set->size(), 1u);
      });
  CHECK(failures >= 2);
}

TEST("steal: a failed steal leaves everything in the set") {
  const auto failures = failing_new::each_allocation(
      [] {
        auto set = std::make_unique<TouchedKeySet>(1000, 4);
        set->insert(range(0, 500));
        return set;
      },
      [](auto& set) { set->steal(); },
      [](auto& set) {
        CHECK_EQ(set->size(), 500u);
        CHECK(sorted(set->steal()) == range(0, 500));
      });
  CHECK(failures >= 2);
}
