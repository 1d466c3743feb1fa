// "Dropped if and only if the count before is below the threshold" must hold for every id that the filter still remembers: an id
// that is never admitted never trains, an id admitted at once takes a row for nothing.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "monolith/admission.h"
#include "monolith/error.h"
#include "monolith/hash.h"

using monolith::SlidingFilter;
using monolith::SlotThresholds;

TEST("each threshold 0..15 admits at occurrence T + 1") {
  for (std::uint32_t threshold = 0; threshold <= 15; ++threshold) {
    SlidingFilter filter(300, 7, SlotThresholds(threshold));
    for (std::uint32_t occurrence = 1; occurrence <= 20; ++occurrence) {
      CHECK_EQ(filter.admit(77, 1), occurrence > threshold);
    }
  }
}

TEST("add returns the old count, counts saturate at 15, get changes nothing") {
  SlidingFilter filter(300, 7, SlotThresholds(1));
  CHECK_EQ(filter.get(9), 0u);
  CHECK_EQ(filter.add(9, 4), 0u);
  CHECK_EQ(filter.get(9), 4u);
  CHECK_EQ(filter.add(9, UINT32_MAX), 4u);
  CHECK_EQ(filter.get(9), 15u);
  CHECK_EQ(filter.add(9, 1), 15u);
  CHECK_EQ(filter.get(9), 15u);
}

TEST("while nothing is forgotten, counts are exact but for the few ids that share a signature") {
  std::mt19937_64 random(3);
  SlidingFilter filter(100000, 7, SlotThresholds(3));
  std::unordered_map<std::int64_t, std::uint32_t> model;
  std::uint64_t wrong = 0;
  std::uint64_t asked = 0;
  std::int64_t once = std::int64_t{1} << 60;
  for (int i = 0; i < 150000; ++i) {
    // Every other id comes only once, so the ring moves on while the others keep coming back.
    const std::int64_t id = i % 2 == 0 ? ++once : static_cast<std::int64_t>(random() % 3000) << (i % 4 == 1 ? 0 : 40);
    const auto count = static_cast<std::uint32_t>(1 + random() % 2);
    auto& expected = model[id];
    wrong += filter.add(id, count) != expected;
    ++asked;
    expected = std::min(15u, expected + count);
  }
  CHECK_EQ(filter.failure_count(), 0u);
  CHECK(filter.head_increment() >= 5);
  CHECK(wrong * 100 < asked);
}

TEST("an id seen again keeps its count while the ring turns; an id not seen for a whole turn is forgotten") {
  SlidingFilter filter(3000, 7, SlotThresholds(15));
  const std::uint64_t split = filter.split_capacity();
  std::int64_t next = 1000000;
  CHECK_EQ(filter.add(1, 2), 0u);
  CHECK_EQ(filter.add(2, 2), 0u);
  std::uint32_t kept = 2;
  for (int turn = 0; turn < 12; ++turn) {
    for (std::uint64_t i = 0; i < split; ++i) filter.add(next++, 1);
    const std::uint32_t old = filter.add(1, 1);
    CHECK_EQ(old, kept);
    kept = std::min(15u, kept + 1);
  }
  CHECK_EQ(filter.get(2), 0u);
  CHECK(filter.head_increment() >= 7);
}

TEST("a full neighbourhood admits and is counted: the filter fails open") {
  SlidingFilter filter(1000000, 7, SlotThresholds(15));
  std::mt19937_64 random(1);
  std::vector<std::int64_t> crowd;
  // Ids whose hash begins alike share a home cell.
  while (crowd.size() < 60) {
    const auto id = static_cast<std::int64_t>(random());
    if (monolith::hash_id(id) >> 47 == 12345) crowd.push_back(id);
  }
  for (const std::int64_t id : crowd) filter.add(id, 1);
  CHECK(filter.failure_count() > 0);
  const auto failures = filter.failure_count();
  CHECK(filter.admit(crowd.back(), 1));
  CHECK_EQ(filter.failure_count(), failures + 1);
  CHECK_EQ(filter.get(crowd.back()), 15u);
  CHECK_EQ(filter.failure_count(), failures + 1);
}

TEST("thresholds are looked up by the slot of a fid v2") {
  SlidingFilter filter(300, 7, SlotThresholds(0, {{3, 1}, {32767, 2}}));
  const std::int64_t slot3 = std::int64_t{3} << 48 | 5;
  const std::int64_t slot4 = std::int64_t{4} << 48 | 5;
  const std::int64_t last = std::int64_t{32767} << 48 | 5;
  CHECK(!filter.admit(slot3, 1));
  CHECK(filter.admit(slot3, 1));
  CHECK(filter.admit(slot4, 1));
  CHECK_EQ(filter.get(slot4), 0u);  // threshold 0 is not even counted
  CHECK(!filter.admit(last, 1));
  CHECK(!filter.admit(-1, 1));  // the sign bit is not part of the slot: -1 is slot 32767 too
  CHECK_EQ(filter.threshold(INT64_MIN), 0u);
}

TEST("a batch is the same as its ids one by one") {
  std::mt19937_64 random(8);
  SlidingFilter one(3000, 7, SlotThresholds(2));
  SlidingFilter batch(3000, 7, SlotThresholds(2));
  std::vector<std::int64_t> ids(20000);
  std::vector<std::uint32_t> counts(ids.size());
  for (auto& id : ids) id = static_cast<std::int64_t>(random() % 4000);
  for (auto& count : counts) count = static_cast<std::uint32_t>(1 + random() % 3);
  const auto out = std::make_unique<bool[]>(ids.size());
  batch.admit(ids, counts, {out.get(), ids.size()});
  for (std::size_t i = 0; i < ids.size(); ++i) REQUIRE(out[i] == one.admit(ids[i], counts[i]));
  CHECK_EQ(batch.head_increment(), one.head_increment());
}

TEST("what cannot work is refused, with nothing counted") {
  CHECK_THROWS(SlidingFilter(300, 7, SlotThresholds(16)), monolith::InvalidArgument);
  CHECK_THROWS(SlidingFilter(300, 7, SlotThresholds(0, {{9, 16}})), monolith::InvalidArgument);
  CHECK_THROWS(SlotThresholds(0, {{32768, 1}}), monolith::InvalidArgument);
  CHECK_THROWS(SlidingFilter(299, 7, SlotThresholds(1)), monolith::InvalidArgument);
  CHECK_THROWS(SlidingFilter(UINT64_MAX, 7, SlotThresholds(1)), monolith::InvalidArgument);
  CHECK_THROWS(SlidingFilter(300, 4, SlotThresholds(1)), monolith::InvalidArgument);
  CHECK_THROWS(SlidingFilter(300, 1025, SlotThresholds(1)), monolith::InvalidArgument);
  CHECK_THROWS(SlidingFilter(300, 200, SlotThresholds(1)), monolith::InvalidArgument);
  SlidingFilter filter(300, 7, SlotThresholds(1));
  const std::vector<std::int64_t> ids{1, 2};
  bool out[2];
  CHECK_THROWS(filter.admit(ids, std::vector<std::uint32_t>{1}, out), monolith::InvalidArgument);
  CHECK_THROWS(filter.admit(ids, std::vector<std::uint32_t>{1, 0}, out), monolith::InvalidArgument);
  CHECK_THROWS(filter.admit(ids, {}, {out, 1}), monolith::InvalidArgument);
  CHECK_EQ(filter.get(1), 0u);
  try {
    SlidingFilter(300, 7, SlotThresholds(0, {{9, 16}}));
  } catch (const monolith::InvalidArgument& error) {
    CHECK(std::string(error.what()).find("slot_thresholds[9] is 16, expected 0..15") != std::string::npos);
  }
}

TEST("memory is taken as the ring is used and never exceeds what was announced") {
  SlidingFilter filter(1000000, 7, SlotThresholds(3));
  CHECK(filter.bytes() < 200000);
  CHECK(filter.max_bytes() > 2 * 1000000);
  std::int64_t next = 0;
  for (int turn = 0; turn < 20; ++turn) {
    for (int i = 0; i < 100000; ++i) filter.add(next++, 1);
    CHECK(filter.bytes() <= filter.max_bytes());
  }
  CHECK_EQ(filter.bytes(), filter.max_bytes());
}
