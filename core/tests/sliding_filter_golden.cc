// The admission masks of the original's own tests. They say at which occurrence an id starts to train; a difference of one would
// change every model that uses a filter.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/admission.h"

using monolith::SlidingFilter;
using monolith::SlotThresholds;

namespace {

std::string mask(SlidingFilter& filter, const std::vector<std::int64_t>& ids) {
  const auto out = std::make_unique<bool[]>(ids.size());
  filter.admit(ids, {}, {out.get(), ids.size()});
  std::string text;
  for (std::size_t i = 0; i < ids.size(); ++i) text += out[i] ? '1' : '0';
  return text;
}

}  // namespace

TEST("reference 5.5: a ring of 100 splits of 3") {
  SlidingFilter filter(300, 100, SlotThresholds(2));
  CHECK_EQ(filter.split_capacity(), 3u);
  const std::vector<std::int64_t> ids{1, 1 << 17, 2 << 17, 1};
  CHECK_EQ(mask(filter, ids), "0000");
  CHECK_EQ(mask(filter, ids), "1001");
  CHECK_EQ(filter.head(), 4u);
  CHECK_EQ(filter.head_increment(), 4u);
  const auto elements = filter.elements();
  for (std::size_t split = 0; split < elements.size(); ++split) CHECK_EQ(elements[split], split < 4 ? 2u : 0u);
  CHECK_EQ(mask(filter, ids), "1111");
  CHECK_EQ(mask(filter, ids), "1111");
  CHECK_EQ(filter.failure_count(), 0u);
}

TEST("reference 5.9: threshold 3, four backward runs") {
  SlidingFilter filter(300, 7, SlotThresholds(3));
  const std::vector<std::int64_t> ids{1, 3 << 17, 1};
  for (const char* expected : {"000", "001", "101", "111"}) CHECK_EQ(mask(filter, ids), expected);
}

TEST("reference 5.3: sgd with threshold 3, ids 0, 0, 1 per step") {
  SlidingFilter filter(300, 7, SlotThresholds(3));
  // An id that entered the table is no longer counted, as in the table's own write path.
  std::array<double, 2> value{0, 0};
  std::array<bool, 2> in_table{false, false};
  const double expected[4][2] = {{0, 0}, {0.1, 0}, {0.3, 0}, {0.5, 0.1}};
  for (const auto& after : expected) {
    for (const std::int64_t id : {0, 0, 1}) {
      if (!in_table[id] && !filter.admit(id, 1)) continue;
      in_table[id] = true;
      value[id] += 0.1;
    }
    CHECK_NEAR(value[0], after[0], 1e-12);
    CHECK_NEAR(value[1], after[1], 1e-12);
  }
}

TEST("a first batch of more copies than the threshold is still dropped whole") {
  SlidingFilter filter(300, 7, SlotThresholds(3));
  CHECK(!filter.admit(5, 100));
  CHECK(filter.admit(5, 1));
}
