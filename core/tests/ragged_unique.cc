// Deduplication decides which gradient goes to which row: two ids mixed up, or one id kept twice, trains the wrong rows. Order of
// first occurrence is part of the contract (the original's unique_key_with_value_and_offset).
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "inverse_hash.h"
#include "monolith/error.h"
#include "monolith/ragged.h"

using Ids = std::vector<std::int64_t>;

namespace {

void verify(const Ids& ids) {
  Ids unique(ids.size());
  Ids inverse(ids.size());
  Ids counts(ids.size());
  const std::size_t found = monolith::unique_with_inverse(ids, unique, inverse, counts);
  Ids first_seen;
  std::unordered_map<std::int64_t, std::int64_t> position;
  Ids expected_counts;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto [entry, is_new] = position.emplace(ids[i], static_cast<std::int64_t>(first_seen.size()));
    if (is_new) {
      first_seen.push_back(ids[i]);
      expected_counts.push_back(0);
    }
    ++expected_counts[entry->second];
    REQUIRE(inverse[i] == entry->second);
  }
  unique.resize(found);
  counts.resize(found);
  CHECK(unique == first_seen);
  CHECK(counts == expected_counts);
  Ids without_counts(ids.size());
  CHECK_EQ(monolith::unique_with_inverse(ids, without_counts, inverse), found);
}

}  // namespace

TEST("golden of reference 10.1") {
  Ids unique(5);
  Ids inverse(5);
  CHECK_EQ(monolith::unique_with_inverse(Ids{0, 1, 2, 1, 0}, unique, inverse), 3u);
  CHECK(Ids(unique.begin(), unique.begin() + 3) == (Ids{0, 1, 2}));
  CHECK(inverse == (Ids{0, 1, 2, 1, 0}));
}

TEST("random batches of every kind agree with a hash map") {
  std::mt19937_64 random(6);
  verify({});
  verify({INT64_MIN, 0, -1, INT64_MAX, 0, INT64_MIN, -1});
  for (const std::size_t n : {1u, 2u, 31u, 32u, 33u, 1000u, 16384u, 100000u, 300000u}) {
    for (const std::uint64_t universe : {std::uint64_t{1}, std::uint64_t{n / 3 + 1}, UINT64_MAX}) {
      Ids ids(n);
      for (auto& id : ids) id = static_cast<std::int64_t>(random() % universe);
      verify(ids);
    }
  }
}

TEST("a batch that is all new ids first and all old ones later, and the other way round, still finds its size") {
  Ids ids;
  for (int i = 0; i < 60000; ++i) ids.push_back(i);
  for (int i = 0; i < 60000; ++i) ids.push_back(7);
  verify(ids);
  verify(Ids(ids.rbegin(), ids.rend()));
}

TEST("ids that crowd into one place of the table are still told apart") {
  // The same first 40 bits of the hash: every id wants the same slot, and the last one at that.
  Ids ids;
  for (std::uint64_t i = 0; i < 3000; ++i) ids.push_back(id_with_hash(0xFFFFFFFFFF000000ull + i % 2000));
  verify(ids);
  // The same 32 bits that a slot remembers too: only the id itself tells them apart.
  ids.clear();
  for (std::uint64_t i = 0; i < 3000; ++i) ids.push_back(id_with_hash((i % 2000) << 32 | 77));
  verify(ids);
}

TEST("buffers of the wrong size are refused") {
  Ids three(3);
  Ids two(2);
  CHECK_THROWS(monolith::unique_with_inverse(three, two, three), monolith::InvalidArgument);
  CHECK_THROWS(monolith::unique_with_inverse(three, three, two), monolith::InvalidArgument);
  Ids unique(3);
  CHECK_THROWS(monolith::unique_with_inverse(three, unique, three, two), monolith::InvalidArgument);
}
