// Running out of memory while counting, saving or restoring must leave the filter as it was.
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "monolith/admission.h"

using monolith::ProbabilisticFilter;
using monolith::SlidingFilter;
using monolith::SlotThresholds;

namespace {

std::unique_ptr<SlidingFilter> used_filter() {
  auto filter = std::make_unique<SlidingFilter>(300, 7, SlotThresholds(3));
  for (std::int64_t id = 0; id < 40; ++id) filter->add(id, 2);
  return filter;
}

}  // namespace

TEST("construction throws and leaks nothing") {
  CHECK(failing_new::each_allocation([] { return 0; }, [](int) { SlidingFilter(300, 7, SlotThresholds(3, {{1, 2}})); },
                                     [](int) {}) >= 3);
}

TEST("the first add allocates; if that fails nothing was counted") {
  CHECK(failing_new::each_allocation([] { return std::make_unique<SlidingFilter>(300, 7, SlotThresholds(3)); },
                                     [](auto& filter) { filter->add(5, 1); },
                                     [](auto& filter) {
                                       CHECK_EQ(filter->get(5), 0u);
                                       CHECK_EQ(filter->add(5, 1), 0u);
                                       CHECK_EQ(filter->add(5, 1), 1u);
                                     }) >= 2);
}

TEST("an add that needs the next split: if it cannot be had nothing was counted") {
  const auto full = [] {
    auto filter = std::make_unique<SlidingFilter>(300, 7, SlotThresholds(3));
    for (std::int64_t id = 0; filter->head_increment() == 0; ++id) filter->add(id, 1);
    return filter;
  };
  CHECK(failing_new::each_allocation(full, [](auto& filter) { filter->add(-5, 1); },
                                     [&](auto& filter) {
                                       CHECK(filter->serialize() == full()->serialize());
                                       CHECK_EQ(filter->add(-5, 1), 0u);
                                     }) >= 1);
}

TEST("serialize and restore") {
  const auto good = used_filter()->serialize();
  CHECK(failing_new::each_allocation(used_filter, [](auto& filter) { filter->serialize(); },
                                     [&](auto& filter) { CHECK(filter->serialize() == good); }) >= 1);
  CHECK(failing_new::each_allocation(
            [] {
              auto filter = std::make_unique<SlidingFilter>(300, 7, SlotThresholds(3));
              filter->add(1234, 7);
              return filter;
            },
            [&](auto& filter) { filter->restore(good); },
            [&](auto& filter) {
              CHECK_EQ(filter->get(1234), 7u);
              filter->restore(good);
              CHECK(filter->serialize() == good);
            }) >= 3);
}
