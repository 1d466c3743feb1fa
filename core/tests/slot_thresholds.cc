// Thresholds are kept by the slot of an id. One slot too far to the left would let the rare ids of one feature in and keep the
// ids of another out.
#include <cstdint>
#include <map>
#include <string>

#include "check.h"
#include "monolith/admission.h"
#include "monolith/error.h"

namespace {

using monolith::SlotThresholds;

std::int64_t in_slot(std::uint64_t slot, std::uint64_t signature = 0) { return static_cast<std::int64_t>(slot << 48 | signature); }

}  // namespace

TEST("a slot has its own threshold or the default") {
  const SlotThresholds thresholds(3, {{0, 1}, {7, 0}, {32767, 9}});
  for (const std::uint64_t signature : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 48) - 1}) {
    CHECK_EQ(thresholds.of(in_slot(0, signature)), 1u);
    CHECK_EQ(thresholds.of(in_slot(7, signature)), 0u);
    CHECK_EQ(thresholds.of(in_slot(32767, signature)), 9u);
    for (const std::uint64_t slot : {1, 6, 8, 32766}) CHECK_EQ(thresholds.of(in_slot(slot, signature)), 3u);
  }
}

TEST("the sign of an id is no part of its slot") {
  const SlotThresholds thresholds(3, {{5, 2}});
  const auto negative = static_cast<std::int64_t>(std::uint64_t{1} << 63 | std::uint64_t{5} << 48 | 77);
  CHECK_EQ(thresholds.of(negative), 2u);
  CHECK_EQ(thresholds.of(-1), 3u);
}

TEST("slots that do not exist are refused") {
  CHECK_THROWS(SlotThresholds(1, {{32768, 1}}), monolith::InvalidArgument);
}

TEST("a threshold above what a filter can count is refused by slot") {
  const SlotThresholds thresholds(3, {{5, 16}});
  thresholds.require_at_most(16, "filter", "");
  try {
    thresholds.require_at_most(15, "sliding filter", "it counts to 15");
    CHECK(false);
  } catch (const monolith::InvalidArgument& error) {
    const std::string message = error.what();
    CHECK(message.find("5") != std::string::npos);
    CHECK(message.find("16") != std::string::npos);
    CHECK(message.find("it counts to 15") != std::string::npos);
  }
  CHECK_THROWS(SlotThresholds(16).require_at_most(15, "sliding filter", ""), monolith::InvalidArgument);
}

TEST("a filter without a threshold admits and does not count") {
  monolith::SlidingFilter filter(1000, 10, SlotThresholds(2, {{4, 0}}));
  for (int i = 0; i < 100; ++i) CHECK(filter.admit(in_slot(4, static_cast<std::uint64_t>(i)), 1));
  for (const std::uint64_t elements : filter.elements()) CHECK_EQ(elements, 0u);
  CHECK(!filter.admit(in_slot(3, 1), 1));
  CHECK(!filter.admit(in_slot(3, 1), 1));
  CHECK(filter.admit(in_slot(3, 1), 1));
}

TEST("a batch that does not fit is refused before anything is counted") {
  monolith::SlidingFilter filter(1000, 10, SlotThresholds(2));
  const std::int64_t ids[] = {1, 2, 3};
  const std::uint32_t counts[] = {1, 0, 1};
  bool out[3];
  CHECK_THROWS(filter.admit(ids, counts, out), monolith::InvalidArgument);
  CHECK_THROWS(filter.admit(ids, std::span(counts, 2), out), monolith::InvalidArgument);
  CHECK_THROWS(filter.admit(ids, {}, std::span(out, 2)), monolith::InvalidArgument);
  for (const std::int64_t id : ids) CHECK_EQ(filter.get(id), 0u);
}
