// A shard with one block is found without its directory. If the view still said so after the block was split, half of the ids would be
// looked for in the wrong half, and get a second row.
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "monolith/hash.h"
#include "shard_index.h"

namespace {

using monolith::hash_id;
using monolith::ShardIndex;

// Inserts ids of one shard until it has `blocks`-fold the entries of one block, and looks for all of them after every growth.
void insert(ShardIndex& index, std::vector<std::int64_t>& ids, std::size_t count, std::uint32_t shard) {
  std::int64_t id = ids.empty() ? 0 : ids.back();
  std::uint64_t growths = index.growths();
  while (ids.size() < count) {
    const std::uint64_t hash = hash_id(++id);
    if (monolith::shard_of(hash) != shard) continue;
    const auto search = index.search(id, hash);
    REQUIRE(!search.found);
    ids.push_back(id);
    index.insert(search, id, hash, static_cast<std::uint32_t>(ids.size()), 5);
    if (index.growths() == growths && ids.size() < count) continue;
    growths = index.growths();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto slot = index.find(ids[i], hash_id(ids[i]));
      REQUIRE(slot);
      REQUIRE(slot.row() == i + 1);
    }
  }
}

}  // namespace

TEST("a shard of one block needs no directory, one of two does") {
  for (const std::uint32_t shard : {0u, 63u, 127u}) {
    monolith::BlockPool pool;
    monolith::ShardView view;
    ShardIndex index(pool, view, shard);
    std::vector<std::int64_t> ids;
    CHECK_EQ(view.size, 1u);
    CHECK(view.entries == &view.only);
    // A block of full size holds 512 buckets of four ids, three quarters full.
    insert(index, ids, 1500, shard);
    CHECK_EQ(view.size, 1u);
    insert(index, ids, 1600, shard);
    CHECK(view.size > 1);
    CHECK(view.entries != &view.only);
    insert(index, ids, 9000, shard);
    std::size_t found = 0;
    index.for_each([&](std::int64_t, std::uint64_t, ShardIndex::Slot) { ++found; });
    CHECK_EQ(found, ids.size());
  }
}

TEST("a shard that was cleared is one block again") {
  monolith::BlockPool pool;
  monolith::ShardView view;
  ShardIndex index(pool, view, 3);
  std::vector<std::int64_t> ids;
  insert(index, ids, 4000, 3);
  CHECK(view.size > 1);
  index.clear();
  CHECK_EQ(view.size, 1u);
  CHECK(view.entries == &view.only);
  for (const std::int64_t id : ids) REQUIRE(!index.find(id, hash_id(id)));
  ids.clear();
  insert(index, ids, 4000, 3);
}
