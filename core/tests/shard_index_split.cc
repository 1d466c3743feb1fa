// A split writes both halves in one pass, into memory that is not cleared and may hold the ids of another shard, and inserts ids
// that were away from their first bucket again. A mistake loses ids, finds those of the block's former owner, or mixes up rows
// and times.
#include <optional>
#include <vector>

#include "check.h"
#include "inverse_hash.h"
#include "shard_index.h"

namespace {

using monolith::ShardIndex;

constexpr std::uint32_t kShard = 5;

// Full blocks split; `crowded` of the low bits are the same for all ids, so that they crowd into few buckets.
std::vector<std::int64_t> ids_of(std::int64_t first, std::size_t n, int crowded) {
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t random = monolith::hash_id(first + static_cast<std::int64_t>(i)) >> monolith::kShardBits;
    const std::uint64_t hash = std::uint64_t{kShard} << (64 - monolith::kShardBits) | random;
    ids.push_back(id_with_hash(hash >> crowded << crowded | (hash >> 40 & ((1u << crowded) - 1) & 3)));
  }
  return ids;
}

void insert(ShardIndex& index, const std::vector<std::int64_t>& ids) {
  for (std::uint32_t i = 0; i < ids.size(); ++i) {
    const std::uint64_t hash = monolith::hash_id(ids[i]);
    index.insert(index.search(ids[i], hash), ids[i], hash, i + 1, 7 * i);
  }
}

void check_all(const ShardIndex& index, const std::vector<std::int64_t>& ids) {
  CHECK_EQ(index.size(), ids.size());
  for (std::uint32_t i = 0; i < ids.size(); ++i) {
    const auto slot = index.find(ids[i], monolith::hash_id(ids[i]));
    REQUIRE(static_cast<bool>(slot));
    REQUIRE(slot.row() == i + 1);
    REQUIRE(slot.time() == 7 * i);
  }
  std::size_t scanned = 0;
  index.for_each([&](std::int64_t, std::uint64_t, ShardIndex::Slot) { ++scanned; });
  CHECK_EQ(scanned, ids.size());
}

// One index after the other on the same memory.
void check_reuse(int crowded) {
  monolith::BlockPool pool;
  monolith::ShardView view;
  const auto before = ids_of(0, 12000, crowded);
  const auto after = ids_of(1'000'000, 12000, crowded);
  std::optional<ShardIndex> index(std::in_place, pool, view, kShard);
  insert(*index, before);
  check_all(*index, before);
  CHECK(index->growths() > 8);
  index.emplace(pool, view, kShard);
  insert(*index, after);
  check_all(*index, after);
  for (const std::int64_t id : before) REQUIRE(!index->find(id, monolith::hash_id(id)));
}

}  // namespace

TEST("splits keep every id, in memory of a former index") { check_reuse(0); }

TEST("splits keep ids that crowd into few buckets") { check_reuse(5); }
