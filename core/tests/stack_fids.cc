// Danger: two ids of a feature become one fid, or a fid lands in the row or slot of another feature.
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/fids.h"

using namespace monolith;

namespace {

using Column = std::vector<std::int64_t>;

std::vector<std::int64_t> stacked(const std::vector<Column>& columns, const std::vector<std::int64_t>& slots) {
  const std::vector<std::span<const std::int64_t>> spans(columns.begin(), columns.end());
  std::vector<std::int64_t> out(columns.empty() ? 0 : columns.size() * columns[0].size());
  stack_fids(spans, slots, out);
  return out;
}

}  // namespace

TEST("rows follow each other and each id has the slot of its column") {
  const std::int64_t one = std::int64_t{1} << kFidSignatureBits;
  CHECK(stacked({{1, 2, 3}, {4, 5, 6}}, {7, -1}) == (Column{7 * one + 1, 4, 7 * one + 2, 5, 7 * one + 3, 6}));
  CHECK(stacked({}, {}).empty());
  CHECK(stacked({{}, {}}, {1, 2}).empty());
}

TEST("only an id that is too long is hashed") {
  const std::int64_t one = std::int64_t{1} << kFidSignatureBits;
  const std::int64_t last = kFidSlots - 1;
  for (const std::int64_t slot : {std::int64_t{0}, std::int64_t{9}, last}) {
    for (const std::int64_t fits : {std::int64_t{0}, one - 1}) {
      CHECK(fid_of(fits, slot) == slot * one + fits);
      CHECK(fid_of(fid_of(fits, slot), slot) == slot * one + fits);
    }
    for (const std::int64_t id : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min(), (slot ^ 1) * one + 5}) {
      CHECK_EQ(fid_of(id, slot), slot * one + static_cast<std::int64_t>(hash_id(id) >> 16));
    }
  }
}

TEST("columns of different lengths and unknown slots are refused") {
  CHECK_THROWS(stacked({{1, 2}, {3}}, {1, 2}), InvalidArgument);
  CHECK_THROWS(stacked({{1}}, {1, 2}), InvalidArgument);
  CHECK_THROWS(stacked({{1}}, {kFidSlots}), InvalidArgument);
}

TEST("slots are put on ids in place, by column or by row, as stack_fids does") {
  const std::int64_t large = std::numeric_limits<std::int64_t>::max() - 5;
  const std::vector<Column> columns = {{1, 2, large}, {4, -5, 6}};
  for (const Column& slots : {Column{7, -1}, Column{0, 32767}, Column{-1, -1}}) {
    const Column expected = stacked(columns, slots);
    Column by_column = {1, 4, 2, -5, large, 6};
    put_slots(by_column, 2, slots, false);
    CHECK(by_column == expected);
    Column by_row = {1, 2, large, 4, -5, 6};
    put_slots(by_row, 3, slots, true);
    CHECK(by_row == (Column{expected[0], expected[2], expected[4], expected[1], expected[3], expected[5]}));
  }
  Column none;
  put_slots(none, 2, Column{1, 2}, false);
  put_slots(none, 0, Column{}, true);
}

TEST("slots that do not fit the ids are refused before any id changes") {
  Column ids = {1, 2, 3, 4};
  CHECK_THROWS(put_slots(ids, 2, Column{1}, false), InvalidArgument);
  CHECK_THROWS(put_slots(ids, 4, Column{1, 2}, true), InvalidArgument);
  CHECK_THROWS(put_slots(ids, 3, Column{1, 2, 3}, false), InvalidArgument);
  CHECK_THROWS(put_slots(ids, 2, Column{1, kFidSlots}, false), InvalidArgument);
  CHECK(ids == (Column{1, 2, 3, 4}));
}
