// Running out of memory must not lose a changed id: not while inserting, not while handing out, not while taking back.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "monolith/touched_set.h"

using monolith::ChangedIdSet;
using Ids = std::vector<std::int64_t>;

namespace {

Ids range(std::int64_t begin, std::int64_t end) {
  Ids ids(end - begin);
  std::iota(ids.begin(), ids.end(), begin);
  return ids;
}

std::unique_ptr<ChangedIdSet> with(std::int64_t n) {
  auto set = std::make_unique<ChangedIdSet>();
  set->insert(range(0, n));
  return set;
}

Ids content(ChangedIdSet& set) {
  Ids ids = *set.steal();
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

TEST("insert: ids from before stay and inserting again completes it") {
  const auto failures = failing_new::each_allocation([] { return with(1000); },
                                                     [](auto& set) { set->insert(range(1000, 3000)); },
                                                     [](auto& set) {
                                                       CHECK(set->size() >= 1000);
                                                       set->insert(range(1000, 3000));
                                                       CHECK(content(*set) == range(0, 3000));
                                                     });
  CHECK(failures >= 2);
}

TEST("steal: a failed steal puts nothing into flight") {
  const auto failures = failing_new::each_allocation([] { return with(1000); }, [](auto& set) { set->steal(); },
                                                     [](auto& set) {
                                                       CHECK_EQ(set->in_flight(), 0u);
                                                       CHECK(content(*set) == range(0, 1000));
                                                     });
  CHECK(failures >= 2);
}

TEST("rollback: after a failure the ids are still in flight, and rolling back again completes it") {
  const auto failures = failing_new::each_allocation(
      [] {
        auto set = with(1000);
        set->steal();
        set->insert(range(900, 1100));
        return set;
      },
      [](auto& set) { set->rollback(); },
      [](auto& set) {
        CHECK_EQ(set->in_flight(), 1000u);
        CHECK(set->size() >= 200);
        set->rollback();
        CHECK(content(*set) == range(0, 1100));
      });
  CHECK(failures >= 2);
}
