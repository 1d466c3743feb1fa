// The kernels need scratch memory; not getting it must be an exception, and the next call must work.
#include <cstdint>
#include <numeric>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "monolith/ragged.h"

using Ids = std::vector<std::int64_t>;

TEST("unique_with_inverse, growth of its table included") {
  Ids ids(70000);
  std::iota(ids.begin(), ids.end(), 0);
  Ids unique(ids.size());
  Ids inverse(ids.size());
  const auto failures = failing_new::each_allocation([] { return 0; },
                                                     [&](int) { monolith::unique_with_inverse(ids, unique, inverse); },
                                                     [&](int) {
                                                       CHECK_EQ(monolith::unique_with_inverse(ids, unique, inverse), ids.size());
                                                       CHECK(unique == ids);
                                                     });
  CHECK(failures >= 2);
}

TEST("splits and restore_order") {
  Ids ids(100);
  std::iota(ids.begin(), ids.end(), 0);
  Ids order(ids.size());
  Ids sizes(3);
  Ids back(ids.size());
  CHECK(failing_new::each_allocation([] { return 0; }, [&](int) { monolith::split_by_shard(ids, order, sizes); },
                                     [](int) {}) >= 2);
  CHECK(failing_new::each_allocation(
            [] { return 0; }, [&](int) { monolith::restore_order(ids.data(), 8, order, back.data()); }, [](int) {}) >= 1);
}
