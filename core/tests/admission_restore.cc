// A filter that restores to other counts would admit ids twice as late after every restart; one that restores from damaged bytes
// would do anything.
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "monolith/admission.h"
#include "monolith/crc32c.h"
#include "monolith/error.h"

using monolith::ProbabilisticFilter;
using monolith::SlidingFilter;
using monolith::SlotThresholds;
using Bytes = std::vector<std::byte>;

namespace {

std::unique_ptr<SlidingFilter> used_filter(std::uint64_t capacity, int adds) {
  auto filter = std::make_unique<SlidingFilter>(capacity, 7, SlotThresholds(3));
  std::mt19937_64 random(capacity);
  for (int i = 0; i < adds; ++i) filter->add(static_cast<std::int64_t>(random() % (2 * capacity)), 1);
  return filter;
}

// Gives altered bytes a checksum that fits, as a hostile writer would.
Bytes sealed(Bytes bytes) {
  const std::uint32_t crc = monolith::crc32c::value(bytes.data(), bytes.size() - 4);
  std::memcpy(bytes.data() + bytes.size() - 4, &crc, 4);
  return bytes;
}

template <typename T>
Bytes with(Bytes bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(value));
  return sealed(std::move(bytes));
}

}  // namespace

TEST("a restored filter answers like the one that was saved, for ever after") {
  for (const int adds : {0, 1, 500, 20000, 300000}) {
    const auto saved = used_filter(20000, adds);
    SlidingFilter restored(20000, 7, SlotThresholds(3));
    restored.add(1, 9);  // what was there before must go
    restored.restore(saved->serialize());
    CHECK(restored.elements() == saved->elements());
    CHECK_EQ(restored.head_increment(), saved->head_increment());
    CHECK_EQ(restored.failure_count(), saved->failure_count());
    std::mt19937_64 random(4);
    for (int i = 0; i < 50000; ++i) {
      const auto id = static_cast<std::int64_t>(random() % 40000);
      REQUIRE(restored.add(id, 1) == saved->add(id, 1));
    }
    CHECK(restored.serialize() == saved->serialize());
  }
}

TEST("thresholds may change between runs, structure may not") {
  const Bytes bytes = used_filter(3000, 5000)->serialize();
  SlidingFilter(3000, 7, SlotThresholds(15)).restore(bytes);
  SlidingFilter(3000, 7, SlotThresholds(0)).restore(bytes);
  SlidingFilter capacity(3001, 7, SlotThresholds(3));
  CHECK_THROWS(capacity.restore(bytes), monolith::CorruptFile);
  SlidingFilter splits(3000, 8, SlotThresholds(3));
  CHECK_THROWS(splits.restore(bytes), monolith::CorruptFile);
  ProbabilisticFilter other(true, 0, SlotThresholds(3));
  CHECK_THROWS(other.restore(bytes), monolith::CorruptFile);
}

TEST("the bytes of a small filter are pinned: they may change only with a new version number") {
  SlidingFilter filter(300, 5, SlotThresholds(2));
  for (const std::int64_t id : {1, 2, 2, 3}) filter.add(id, 1);
  const Bytes bytes = filter.serialize();
  CHECK_EQ(bytes.size(), std::size_t{28 + 8 + 16 + 16 + 5 * 9 + (75 * 6 / 5 + 64) * 2});
  CHECK_EQ(monolith::crc32c::value(bytes.data(), bytes.size() - 4), 629097998u);
  ProbabilisticFilter chance(true, 42, SlotThresholds(2));
  for (int i = 0; i < 10; ++i) chance.admit(i, 1);
  const Bytes small = chance.serialize();
  CHECK_EQ(small.size(), 48u);
  CHECK_EQ(monolith::crc32c::value(small.data(), small.size() - 4), 3058968513u);
}

TEST("every truncation and every flipped bit is refused, and the filter stays as it was") {
  SlidingFilter filter(300, 5, SlotThresholds(2));
  for (std::int64_t id = 0; id < 50; ++id) filter.add(id, 1);
  const Bytes good = filter.serialize();
  for (std::size_t n = 0; n < good.size(); ++n) {
    CHECK_THROWS(filter.restore(std::span(good).first(n)), monolith::CorruptFile);
  }
  for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
    Bytes bad = good;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK_THROWS(filter.restore(bad), monolith::CorruptFile);
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  CHECK_THROWS(filter.restore(longer), monolith::CorruptFile);
  CHECK(filter.serialize() == good);

  ProbabilisticFilter chance(false, 1, SlotThresholds(2));
  const Bytes fair = chance.serialize();
  for (std::size_t n = 0; n < fair.size(); ++n) {
    CHECK_THROWS(chance.restore(std::span(fair).first(n)), monolith::CorruptFile);
  }
  for (std::size_t bit = 0; bit < fair.size() * 8; ++bit) {
    Bytes bad = fair;
    bad[bit / 8] ^= std::byte{1} << (bit % 8);
    CHECK_THROWS(chance.restore(bad), monolith::CorruptFile);
  }
}

TEST("hostile bytes with a fitting checksum are refused too") {
  const auto filter = used_filter(300, 200);
  const Bytes good = filter->serialize();
  const std::size_t body = 24;
  const std::size_t head = body + 8 + 12;
  const std::size_t first_split = head + 4 + 16;
  filter->restore(sealed(good));
  CHECK_THROWS(filter->restore(with(good, 8, std::uint32_t{2})), monolith::CorruptFile);               // version
  CHECK_THROWS(filter->restore(with(good, 12, std::uint32_t{9})), monolith::CorruptFile);              // kind
  CHECK_THROWS(filter->restore(with(good, 16, UINT64_MAX)), monolith::CorruptFile);                    // length
  CHECK_THROWS(filter->restore(with(good, body, UINT64_MAX)), monolith::CorruptFile);                  // capacity
  CHECK_THROWS(filter->restore(with(good, body + 8, UINT32_MAX)), monolith::CorruptFile);              // split_num
  CHECK_THROWS(filter->restore(with(good, head, UINT32_MAX)), monolith::CorruptFile);                  // head
  CHECK_THROWS(filter->restore(with(good, head + 4, filter->head_increment() + 1)), monolith::CorruptFile);        // head_increment
  CHECK_THROWS(filter->restore(with(good, first_split, std::uint64_t{1})), monolith::CorruptFile);     // elements
  CHECK_THROWS(filter->restore(with(good, first_split + 8, std::uint8_t{0})), monolith::CorruptFile);  // blocks: too few
  std::size_t cell = first_split + 9;
  while (good[cell] == std::byte{0}) ++cell;
  CHECK_THROWS(filter->restore(with(good, cell, std::uint8_t{0x10})), monolith::CorruptFile);  // a signature without count
  // Bytes after the last split, in a length and checksum that fit them.
  Bytes longer = good;
  longer.insert(longer.end() - 4, 8, std::byte{0});
  CHECK_THROWS(filter->restore(with(longer, 16, std::uint64_t{longer.size()})), monolith::CorruptFile);
  CHECK(filter->serialize() == good);
}
