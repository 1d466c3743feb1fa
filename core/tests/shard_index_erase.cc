// Erasing shifts ids back along their probe run; a mistake loses ids that are still there, or finds ghosts. Ids are chosen to
// fall into few buckets, so that runs are long, wrap around, and grow and split under churn.
#include <random>
#include <unordered_map>

#include "check.h"
#include "inverse_hash.h"
#include "shard_index.h"

namespace {

using monolith::ShardIndex;

void churn(const std::vector<std::int64_t>& ids, std::uint64_t seed, int rounds) {
  monolith::BlockPool pool;
  monolith::ShardView view;
  ShardIndex index(pool, view, 3);
  std::unordered_map<std::int64_t, std::uint32_t> oracle;
  std::mt19937_64 random(seed);
  for (int i = 0; i < rounds; ++i) {
    const std::int64_t id = ids[random() % ids.size()];
    const std::uint64_t hash = monolith::hash_id(id);
    const auto slot = index.find(id, hash);
    const auto known = oracle.find(id);
    REQUIRE(static_cast<bool>(slot) == (known != oracle.end()));
    if (slot) {
      REQUIRE(slot.row() == known->second);
      index.erase(slot, hash);
      oracle.erase(known);
    } else {
      const std::uint32_t row = static_cast<std::uint32_t>(i + 1);
      index.insert(index.search(id, hash), id, hash, row, 0);
      oracle[id] = row;
    }
    REQUIRE(index.size() == oracle.size());
  }
  for (const std::int64_t id : ids) {
    const auto slot = index.find(id, monolith::hash_id(id));
    const auto known = oracle.find(id);
    REQUIRE(static_cast<bool>(slot) == (known != oracle.end()));
    if (slot) CHECK_EQ(slot.row(), known->second);
  }
}

}  // namespace

TEST("churn on ids spread over a shard") {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 6000; ++i) ids.push_back(id_with_hash((3ull << 57) | (monolith::hash_id(i) >> 7)));
  churn(ids, 1, 60000);
}

TEST("churn on ids that all want the last bucket") {
  std::vector<std::int64_t> ids;
  for (std::uint64_t i = 0; i < 60; ++i) ids.push_back(id_with_hash((3ull << 57) | (i << 40) | 0xFFFF));
  churn(ids, 2, 20000);
}

TEST("ids that share their leading hash bits grow the block, not the directory without bound") {
  monolith::BlockPool pool;
  monolith::ShardView view;
  ShardIndex index(pool, view, 0);
  for (std::uint64_t i = 0; i < 20000; ++i) {
    const std::int64_t id = id_with_hash(i);
    index.insert(index.search(id, i), id, i, static_cast<std::uint32_t>(i + 1), 0);
  }
  for (std::uint64_t i = 0; i < 20000; ++i) REQUIRE(index.find(id_with_hash(i), i).row() == i + 1);
  CHECK(index.directory_bytes() < 64 * 1024);
}
