// Splitting by shard sends every id to its owner and returns its row at the right index. The unsigned modulo is part of the
// contract: two conventions for negative ids would give one id two owners.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/ragged.h"

using Ids = std::vector<std::int64_t>;

TEST("the shard is the unsigned remainder, the order stable, for any number of shards and any id") {
  std::mt19937_64 random(9);
  for (const std::uint64_t shards : {1u, 2u, 3u, 5u, 7u, 8u, 64u, 1000u, 65537u}) {
    Ids ids(3000);
    for (auto& id : ids) id = static_cast<std::int64_t>(random() >> (random() % 60));
    const Ids extremes{INT64_MIN, -1, 0, 1, INT64_MAX, -2, INT64_MIN + 1};
    ids.insert(ids.end(), extremes.begin(), extremes.end());
    std::vector<Ids> expected(shards);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      expected[static_cast<std::uint64_t>(ids[i]) % shards].push_back(static_cast<std::int64_t>(i));
    }
    Ids order(ids.size());
    Ids sizes(shards);
    Ids grouped(ids.size());
    monolith::split_by_shard(ids, order, sizes, grouped);
    std::size_t place = 0;
    for (std::uint64_t shard = 0; shard < shards; ++shard) {
      REQUIRE(sizes[shard] == static_cast<std::int64_t>(expected[shard].size()));
      for (const std::int64_t item : expected[shard]) {
        REQUIRE(order[place] == item);
        REQUIRE(grouped[place] == ids[item]);
        ++place;
      }
    }
    Ids alone(ids.size());
    monolith::split_by_shard(ids, alone, sizes);
    CHECK(alone == order);
  }
}

TEST("restore_order undoes a split, for rows of any size") {
  std::mt19937_64 random(10);
  for (const std::size_t row_bytes : {0u, 1u, 4u, 8u, 12u, 32u, 64u, 100u, 128u, 256u}) {
    Ids ids(500);
    for (auto& id : ids) id = static_cast<std::int64_t>(random());
    Ids order(ids.size());
    Ids sizes(7);
    monolith::split_by_shard(ids, order, sizes);
    std::vector<unsigned char> rows(ids.size() * row_bytes);
    for (auto& byte : rows) byte = static_cast<unsigned char>(random());
    std::vector<unsigned char> grouped(rows.size());
    std::vector<unsigned char> back(rows.size());
    monolith::gather_rows(rows.data(), ids.size(), row_bytes, order, grouped.data());
    for (std::size_t k = 0; k < ids.size(); ++k) {
      for (std::size_t b = 0; b < row_bytes; ++b) REQUIRE(grouped[k * row_bytes + b] == rows[order[k] * row_bytes + b]);
    }
    monolith::restore_order(grouped.data(), row_bytes, order, back.data());
    CHECK(back == rows);
  }
}

TEST("golden of reference 10.1: ragged_split_by_indices") {
  // indices [0, 1, 0, 1] over [[4, 3, 2], [1]] -> [[4, 2], []], [[3], [1]] at positions [[0, 2], []], [[1], [3]].
  Ids order(4);
  Ids sizes(2);
  Ids part_splits(6);
  monolith::split_ragged_by_indices(Ids{0, 1, 0, 1}, Ids{0, 3, 4}, order, sizes, part_splits);
  CHECK(order == (Ids{0, 2, 1, 3}));
  CHECK(sizes == (Ids{2, 2}));
  CHECK(part_splits == (Ids{0, 2, 2, 0, 1, 2}));
}

TEST("what does not fit is refused and named") {
  Ids order(3);
  Ids sizes(2);
  Ids none;
  CHECK_THROWS(monolith::split_by_shard(Ids{1, 2, 3}, order, none), monolith::InvalidArgument);
  CHECK_THROWS(monolith::split_by_shard(Ids{1, 2}, order, sizes), monolith::InvalidArgument);
  try {
    monolith::split_by_indices(Ids{0, 1, 2}, order, sizes);
    CHECK(false);
  } catch (const monolith::InvalidArgument& error) {
    CHECK(std::string(error.what()).rfind("indices[2] is 2, expected 0..1", 0) == 0);
  }
  CHECK_THROWS(monolith::split_by_indices(Ids{0, -1, 1}, order, sizes), monolith::InvalidArgument);
  Ids part_splits(4);
  CHECK_THROWS(monolith::split_ragged_by_indices(Ids{0, 1, 0}, Ids{0, 2}, order, sizes, part_splits),
               monolith::InvalidArgument);
  const char rows[3] = {1, 2, 3};
  char out[3];
  CHECK_THROWS(monolith::restore_order(rows, 1, Ids{0, 1, 1}, out), monolith::InvalidArgument);
  CHECK_THROWS(monolith::restore_order(rows, 1, Ids{0, 1, 3}, out), monolith::InvalidArgument);
  CHECK_THROWS(monolith::gather_rows(rows, 3, 1, Ids{0, -1, 1}, out), monolith::InvalidArgument);
}
