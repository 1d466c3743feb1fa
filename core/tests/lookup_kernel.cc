// A lookup processes dozens of ids at once and guesses where each is: it must find displaced ids, recognise absent ones, sum in
// call order, and give the same bits on every instruction set, for every length of a batch and a bag.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "inverse_hash.h"
#include "kernels/kernels.h"
#include "row_pool.h"
#include "shard_index.h"

namespace {

using namespace monolith;

// Every shard with an index and rows of its own; row r of an id starts with the values of value().
class Shards {
 public:
  explicit Shards(std::uint32_t dim) : dim_(dim), region_(dim * 4) {
    for (std::uint32_t s = 0; s < kShards; ++s) {
      indexes_.push_back(std::make_unique<ShardIndex>(blocks_, views_[s], s));
      pools_.push_back(std::make_unique<RowPool>(region_));
    }
  }

  void insert(std::int64_t id) {
    const std::uint64_t hash = hash_id(id);
    RowPool& pool = *pools_[shard_of(hash)];
    const std::uint32_t row = pool.allocate();
    const std::vector<float> weights = value(id);
    std::memcpy(pool.at(row), weights.data(), dim_ * sizeof(float));
    ShardIndex& index = *indexes_[shard_of(hash)];
    index.insert(index.search(id, hash), id, hash, row, 0);
  }

  std::vector<float> value(std::int64_t id) const {
    std::vector<float> weights(dim_);
    for (std::uint32_t i = 0; i < dim_; ++i) weights[i] = static_cast<float>(hash_id(id + i) >> 40) * 0x1p-24f - 0.5f;
    return weights;
  }

  const ShardView* views() const { return views_; }
  RowAddresses rows() const { return region_.addresses(); }

 private:
  std::uint32_t dim_;
  RowRegion region_;
  BlockPool blocks_;
  ShardView views_[kShards];
  std::vector<std::unique_ptr<ShardIndex>> indexes_;
  std::vector<std::unique_ptr<RowPool>> pools_;
};

SegmentPlan floats(std::uint32_t offset, std::uint32_t dim) {
  SegmentPlan segment{};
  segment.dim = dim;
  segment.value_offset = offset;
  segment.weight_offset = offset * 4;
  segment.storage = Storage::kFp32;
  segment.read_path = ReadPath::kRaw;
  return segment;
}

void check_lookups(std::uint32_t dim, const std::vector<std::int64_t>& present, const std::vector<SegmentPlan>& segments) {
  Shards shards(dim);
  for (const std::int64_t id : present) shards.insert(id);
  const std::vector<float> scales(segments.size(), 1);
  LookupPlan plan{shards.views(), shards.rows(), segments.data(), segments.size(), scales.data(), 7, dim, dim, (dim * 4 + 63) / 64 + 1, true, false};
  std::vector<float> scratch(dim);
  for (const std::size_t n : {0u, 1u, 63u, 64u, 65u, 128u, 191u, 192u, 193u, 256u, 257u, 700u}) {
    plan.rows_are_updated = n % 2 == 0;
    std::vector<std::int64_t> ids;
    for (std::size_t i = 0; i < n; ++i) ids.push_back(i % 5 == 4 ? -1 - static_cast<std::int64_t>(i) : present[i * 7 % present.size()]);
    std::vector<std::int64_t> splits = {0};
    for (std::size_t i = 0; splits.back() < static_cast<std::int64_t>(n); ++i) {
      splits.push_back(std::min<std::int64_t>(splits.back() + static_cast<std::int64_t>(i % 4), static_cast<std::int64_t>(n)));
    }
    const std::size_t bags = splits.size() - 1;
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kSqrtN}) {
      std::vector<float> expected(bags * dim);
      for (std::size_t bag = 0; bag < bags; ++bag) {
        for (std::int64_t i = splits[bag]; i < splits[bag + 1]; ++i) {
          if (ids[static_cast<std::size_t>(i)] < 0) continue;
          const std::vector<float> row = shards.value(ids[static_cast<std::size_t>(i)]);
          for (std::uint32_t d = 0; d < dim; ++d) expected[bag * dim + d] += row[d];
        }
        const auto count = static_cast<float>(splits[bag + 1] - splits[bag]);
        const float factor = count == 0 || pooling == Pooling::kSum ? 1 : pooling == Pooling::kMean ? 1 / count : 1 / std::sqrt(count);
        for (std::uint32_t d = 0; d < dim; ++d) expected[bag * dim + d] *= factor;
      }
      for (const Kernels* kernels : all_kernels()) {
        std::vector<float> out(bags * dim, 9);
        kernels->lookup(plan, ids.data(), splits.data(), bags, pooling, out.data(), scratch.data());
        CHECK(out == expected);
      }
    }
    for (const Kernels* kernels : all_kernels()) {
      std::vector<float> out(n * dim, 9);
      kernels->lookup(plan, ids.data(), nullptr, n, Pooling::kSum, out.data(), scratch.data());
      for (std::size_t i = 0; i < n; ++i) {
        const std::vector<float> row = ids[i] < 0 ? std::vector<float>(dim) : shards.value(ids[i]);
        CHECK(std::memcmp(out.data() + i * dim, row.data(), dim * sizeof(float)) == 0);
      }
    }
  }
}

}  // namespace

TEST("lookups find every id, in the widths with loops of their own and in others") {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 3000; ++i) ids.push_back(i * 977);
  for (const std::uint32_t dim : {1u, 4u, 8u, 12u, 16u, 32u, 64u, 70u}) check_lookups(dim, ids, {floats(0, dim)});
}

TEST("segments of floats are read as one") {
  std::vector<std::int64_t> ids;
  for (std::int64_t i = 0; i < 3000; ++i) ids.push_back(i * 977);
  for (const std::uint32_t dim : {9u, 17u, 33u, 65u, 71u}) check_lookups(dim, ids, {floats(0, 1), floats(1, dim - 1)});
}

TEST("lookups find ids far from their first bucket") {
  std::vector<std::int64_t> ids;
  for (std::uint64_t i = 0; i < 60; ++i) {
    const std::int64_t id = id_with_hash((5ull << 57) | (i << 40) | 0xFFFF);
    if (id >= 0) ids.push_back(id);
  }
  REQUIRE(ids.size() > 20);
  check_lookups(16, ids, {floats(0, 16)});
}
