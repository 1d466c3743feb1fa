// A split is cleared lazily, a block of 2,048 cells at a time. An id whose 16 cells lie across two blocks must neither see what
// an earlier pass of the ring left in the second one, nor be counted in cells that will be wiped later.
#include <cstdint>
#include <vector>

#include "check.h"
#include "inverse_hash.h"
#include "monolith/admission.h"

using monolith::SlidingFilter;
using monolith::SlotThresholds;

namespace {

constexpr std::uint64_t kCapacity = 60000;  // splits of 10,000 ids with 12,000 home cells, six blocks
constexpr std::uint64_t kHomes = 12000;

// An id of the given home cell and signature.
std::int64_t id_at(std::uint64_t home, std::uint64_t signature) {
  const auto first = static_cast<std::uint64_t>(((static_cast<unsigned __int128>(home) << 64) + kHomes - 1) / kHomes);
  return id_with_hash(((first >> 12) + 1) << 12 | signature);
}

// Moves the head on by one split, with one id for each home from 0 on: none has to look further than a few cells, so none is
// put into the split after the head. Neighbours have different signatures.
void fill_head(SlidingFilter& filter) {
  const std::uint64_t turn = filter.head_increment();
  for (std::uint64_t home = 0; filter.head_increment() == turn; ++home) {
    REQUIRE(home < kHomes);
    filter.add(id_at(home, 1000 + turn * 16 + home % 16), 1);
  }
}

}  // namespace

TEST("ids across a block border are counted one by one") {
  SlidingFilter filter(kCapacity, 7, SlotThresholds(15));
  REQUIRE(monolith::fast_range(monolith::hash_id(id_at(2047, 5)), kHomes) == 2047);
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (std::uint64_t signature = 1; signature <= 16; ++signature) {
      CHECK_EQ(filter.add(id_at(2047, signature), 1), round);
    }
  }
  CHECK_EQ(filter.elements()[0], 16u);
  CHECK_EQ(filter.failure_count(), 0u);
  SlidingFilter restored(kCapacity, 7, SlotThresholds(15));
  restored.restore(filter.serialize());
  for (std::uint64_t signature = 1; signature <= 16; ++signature) CHECK_EQ(restored.get(id_at(2047, signature)), 3u);
}

TEST("what an earlier turn left behind a block border is not seen") {
  SlidingFilter filter(kCapacity, 7, SlotThresholds(15));
  const std::int64_t old = id_at(2047, 99);
  filter.add(id_at(2047, 7), 1);  // takes cell 2047, so that the old id lies in cell 2048, in the next block
  filter.add(old, 5);
  while (filter.head_increment() < 7) fill_head(filter);
  REQUIRE(filter.head() == 0);
  // Fill cells 2032..2047 of the same split through a home whose 16 cells end at the border: block 1 stays stale.
  for (std::uint64_t signature = 100; signature < 116; ++signature) filter.add(id_at(2032, signature), 1);
  CHECK_EQ(filter.get(old), 0u);
  CHECK_EQ(filter.add(old, 1), 0u);
  CHECK_EQ(filter.add(old, 1), 1u);
  CHECK_EQ(filter.get(id_at(2032, 110)), 1u);
}
