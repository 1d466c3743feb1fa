#include "monolith/ragged.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_features.h"
#include "float_vectors.h"
#include "huge_array.h"
#include "monolith/error.h"
#include "monolith/hash.h"

namespace monolith {
namespace {

void check_size(const char* field, std::size_t size, std::size_t expected) {
  if (size == expected) return;
  throw InvalidArgument(std::string(field) + " has " + std::to_string(size) + " entries, expected " +
                        std::to_string(expected));
}

void refuse_split(std::span<const std::int64_t> row_splits, std::size_t index, const std::string& expected) {
  throw InvalidArgument("offsets[" + std::to_string(index) + "] is " + std::to_string(row_splits[index]) + ", expected " +
                        expected + "; offsets start with 0, never decrease and end with the number of values");
}

std::size_t rows_of(std::span<const std::int64_t> row_splits) noexcept { return row_splits.size() - 1; }

}  // namespace

void check_row_splits(std::span<const std::int64_t> row_splits, std::size_t num_values, std::int64_t first) {
  if (row_splits.empty()) {
    throw InvalidArgument("offsets is empty, expected one entry more than there are rows; no rows at all is [0]");
  }
  if (row_splits.front() != first) refuse_split(row_splits, 0, std::to_string(first));
  // Looks for any decrease without leaving the loop early, which vectorises; the search for it is the rare case.
  bool decreases = false;
  for (std::size_t i = 1; i < row_splits.size(); ++i) decreases |= row_splits[i] < row_splits[i - 1];
  if (decreases) {
    const auto at = std::is_sorted_until(row_splits.begin(), row_splits.end()) - row_splits.begin();
    refuse_split(row_splits, at, "at least " + std::to_string(row_splits[at - 1]) + " (the entry before)");
  }
  if (static_cast<std::uint64_t>(row_splits.back()) - static_cast<std::uint64_t>(first) != num_values) {
    refuse_split(row_splits, row_splits.size() - 1,
                 std::to_string(static_cast<std::uint64_t>(first) + num_values) + " (the number of values)");
  }
}

void value_rowids(std::span<const std::int64_t> row_splits, std::span<std::int64_t> out) {
  check_row_splits(row_splits, out.size());
  // Eight entries are written at once, over the end of a short row: the rows after it overwrite them. No branch depends on
  // the length of a short row, which the CPU could not predict.
  constexpr std::int64_t kStride = 8;
  const auto total = static_cast<std::int64_t>(out.size());
  for (std::size_t row = 0; row < rows_of(row_splits); ++row) {
    std::int64_t at = row_splits[row];
    const std::int64_t end = row_splits[row + 1];
    const auto value = static_cast<std::int64_t>(row);
    if (at + kStride <= total) {
      do {
        for (std::int64_t k = 0; k < kStride; ++k) out[at + k] = value;
        at += kStride;
      } while (at < end && at + kStride <= total);
    }
    for (; at < end; ++at) out[at] = value;
  }
}

// ---- pooling

namespace {

// What sum(x) is divided by.
inline float divisor(Reduction reduction, std::int64_t count) noexcept {
  const auto n = static_cast<float>(std::max<std::int64_t>(count, 1));
  if (reduction == Reduction::kMean) return n;
  if (reduction == Reduction::kSqrtN) return __builtin_sqrtf(n);
  return 1.0f;
}

// The bodies below are inlined into one function per instruction set. They only add, multiply, divide and take roots, element
// by element and in the order of the rows, so every instruction set gives the same bits.
#define MONOLITH_INLINE inline __attribute__((always_inline))

template <typename Vector>
MONOLITH_INLINE void take_root(Vector& x) noexcept {
  if constexpr (sizeof(Vector) == sizeof(float)) {
    x = __builtin_sqrtf(x);
  } else {
    for (std::size_t k = 0; k < sizeof(Vector) / sizeof(float); ++k) x[k] = __builtin_sqrtf(x[k]);
  }
}

// kVectors vectors of columns stay in registers while the rows of a bag pass by.
template <typename Vector, std::size_t kVectors, Reduction kReduction>
MONOLITH_INLINE void reduce_columns(const float* rows, std::int64_t count, std::size_t dim, float by, float* out) noexcept {
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);
  Vector sums[kVectors] = {};
  for (std::int64_t row = 0; row < count; ++row, rows += dim) {
    for (std::size_t v = 0; v < kVectors; ++v) {
      Vector x;
      load(x, rows + v * kLanes);
      if constexpr (kReduction == Reduction::kL2) x *= x;
      sums[v] += x;
    }
  }
  for (std::size_t v = 0; v < kVectors; ++v) {
    if constexpr (kReduction == Reduction::kL2) take_root(sums[v]);
    if constexpr (kReduction == Reduction::kMean) sums[v] /= by;
    store(sums[v], out + v * kLanes);
  }
}

template <typename Vector, std::size_t kVectors, Reduction kReduction>
MONOLITH_INLINE void spread_columns(const float* grad, std::int64_t count, std::size_t dim, float by, float* out) noexcept {
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);
  Vector parts[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) {
    load(parts[v], grad + v * kLanes);
    if constexpr (kReduction == Reduction::kMean) parts[v] /= by;
  }
  for (std::int64_t row = 0; row < count; ++row, out += dim) {
    for (std::size_t v = 0; v < kVectors; ++v) store(parts[v], out + v * kLanes);
  }
}

// Cuts dim columns into pieces of 8, 2 and 1 vectors and single columns.
template <typename Vector, typename Wide, typename Pair, typename Single, typename Column>
MONOLITH_INLINE void by_columns(std::size_t dim, Wide wide, Pair pair, Single single, Column column) noexcept {
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);
  std::size_t at = 0;
  for (; at + 8 * kLanes <= dim; at += 8 * kLanes) wide(at);
  for (; at + 2 * kLanes <= dim; at += 2 * kLanes) pair(at);
  for (; at + kLanes <= dim; at += kLanes) single(at);
  for (; at < dim; ++at) column(at);
}

// kMean stands for every reduction that divides; `reduction` says by what.
template <typename Vector, Reduction kReduction>
MONOLITH_INLINE void pool_bags(Reduction reduction, const float* rows, std::span<const std::int64_t> row_splits,
                               std::size_t dim, float* out) noexcept {
  for (std::size_t bag = 0; bag < rows_of(row_splits); ++bag, out += dim) {
    const float* first = rows + row_splits[bag] * dim;
    const std::int64_t count = row_splits[bag + 1] - row_splits[bag];
    const float by = kReduction == Reduction::kMean ? divisor(reduction, count) : 1.0f;
    by_columns<Vector>(
        dim, [&](std::size_t at) { reduce_columns<Vector, 8, kReduction>(first + at, count, dim, by, out + at); },
        [&](std::size_t at) { reduce_columns<Vector, 2, kReduction>(first + at, count, dim, by, out + at); },
        [&](std::size_t at) { reduce_columns<Vector, 1, kReduction>(first + at, count, dim, by, out + at); },
        [&](std::size_t at) { reduce_columns<float, 1, kReduction>(first + at, count, dim, by, out + at); });
  }
}

template <typename Vector, Reduction kReduction>
MONOLITH_INLINE void spread_bags(Reduction reduction, const float* grad_out, std::span<const std::int64_t> row_splits,
                                 std::size_t dim, float* grad_rows) noexcept {
  for (std::size_t bag = 0; bag < rows_of(row_splits); ++bag, grad_out += dim) {
    float* first = grad_rows + row_splits[bag] * dim;
    const std::int64_t count = row_splits[bag + 1] - row_splits[bag];
    const float by = kReduction == Reduction::kMean ? divisor(reduction, count) : 1.0f;
    by_columns<Vector>(
        dim, [&](std::size_t at) { spread_columns<Vector, 8, kReduction>(grad_out + at, count, dim, by, first + at); },
        [&](std::size_t at) { spread_columns<Vector, 2, kReduction>(grad_out + at, count, dim, by, first + at); },
        [&](std::size_t at) { spread_columns<Vector, 1, kReduction>(grad_out + at, count, dim, by, first + at); },
        [&](std::size_t at) { spread_columns<float, 1, kReduction>(grad_out + at, count, dim, by, first + at); });
  }
}

template <typename Vector>
MONOLITH_INLINE void pool_all(Reduction reduction, const float* rows, std::span<const std::int64_t> row_splits,
                              std::size_t dim, float* out) noexcept {
  switch (reduction) {
    case Reduction::kSum: return pool_bags<Vector, Reduction::kSum>(reduction, rows, row_splits, dim, out);
    case Reduction::kL2: return pool_bags<Vector, Reduction::kL2>(reduction, rows, row_splits, dim, out);
    default: return pool_bags<Vector, Reduction::kMean>(reduction, rows, row_splits, dim, out);
  }
}

template <typename Vector>
MONOLITH_INLINE void spread_all(Reduction reduction, const float* grad_out, std::span<const std::int64_t> row_splits,
                                std::size_t dim, float* grad_rows) noexcept {
  if (reduction == Reduction::kSum) return spread_bags<Vector, Reduction::kSum>(reduction, grad_out, row_splits, dim, grad_rows);
  return spread_bags<Vector, Reduction::kMean>(reduction, grad_out, row_splits, dim, grad_rows);
}

using BagKernel = void (*)(Reduction, const float*, std::span<const std::int64_t>, std::size_t, float*) noexcept;
struct BagKernels {
  BagKernel pool;
  BagKernel spread;
};

void pool_baseline(Reduction reduction, const float* rows, std::span<const std::int64_t> row_splits, std::size_t dim,
                   float* out) noexcept {
  pool_all<Vector4>(reduction, rows, row_splits, dim, out);
}
void spread_baseline(Reduction reduction, const float* grad_out, std::span<const std::int64_t> row_splits, std::size_t dim,
                     float* grad_rows) noexcept {
  spread_all<Vector4>(reduction, grad_out, row_splits, dim, grad_rows);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void pool_avx2(Reduction reduction, const float* rows,
                                               std::span<const std::int64_t> row_splits, std::size_t dim,
                                               float* out) noexcept {
  pool_all<Vector8>(reduction, rows, row_splits, dim, out);
}
__attribute__((target("avx2"))) void spread_avx2(Reduction reduction, const float* grad_out,
                                                 std::span<const std::int64_t> row_splits, std::size_t dim,
                                                 float* grad_rows) noexcept {
  spread_all<Vector8>(reduction, grad_out, row_splits, dim, grad_rows);
}
#endif

#undef MONOLITH_INLINE

const BagKernels& bag_kernels() noexcept {
  static const BagKernels chosen = [] {
#if defined(__x86_64__)
    if (cpu_features().avx2) return BagKernels{pool_avx2, spread_avx2};
#endif
    return BagKernels{pool_baseline, spread_baseline};
  }();
  return chosen;
}

void check_pooling(std::span<const std::int64_t> row_splits, std::size_t dim, const char* by_value, std::size_t value_floats,
                   const char* by_row, std::size_t row_floats) {
  if (dim == 0) throw InvalidArgument("dim is 0, expected at least 1");
  const std::size_t values = value_floats / dim;
  check_size(by_value, value_floats, values * dim);
  check_row_splits(row_splits, values);
  check_size(by_row, row_floats, rows_of(row_splits) * dim);
}

}  // namespace

void pool(Reduction reduction, std::span<const float> rows, std::span<const std::int64_t> row_splits, std::size_t dim,
          std::span<float> out) {
  check_pooling(row_splits, dim, "rows", rows.size(), "out", out.size());
  bag_kernels().pool(reduction, rows.data(), row_splits, dim, out.data());
}

void pool_gradient(Reduction reduction, std::span<const float> grad_out, std::span<const float> rows,
                   std::span<const float> pooled, std::span<const std::int64_t> row_splits, std::size_t dim,
                   std::span<float> grad_rows) {
  check_pooling(row_splits, dim, "grad_rows", grad_rows.size(), "grad_out", grad_out.size());
  if (reduction != Reduction::kL2) {
    bag_kernels().spread(reduction, grad_out.data(), row_splits, dim, grad_rows.data());
    return;
  }
  check_size("rows", rows.size(), grad_rows.size());
  check_size("pooled", pooled.size(), grad_out.size());
  for (std::size_t bag = 0; bag < rows_of(row_splits); ++bag) {
    const float* grad = grad_out.data() + bag * dim;
    const float* norm = pooled.data() + bag * dim;
    for (std::int64_t value = row_splits[bag]; value < row_splits[bag + 1]; ++value) {
      const float* x = rows.data() + value * dim;
      float* to = grad_rows.data() + value * dim;
      for (std::size_t k = 0; k < dim; ++k) to[k] = norm[k] == 0.0f ? 0.0f : grad[k] * x[k] / norm[k];
    }
  }
}

// ---- unique

namespace {

// Open addressing from ids to their position in `unique`. A slot is 32 bits of the hash and the position plus one; 0 is free. The
// table starts small and grows with the distinct ids, at most half full: a batch with many duplicates stays in the L2 cache.
class UniqueTable {
 public:
  explicit UniqueTable(std::size_t ids) : most_(std::bit_ceil(ids * 2)) { allocate(std::min(kFirstSlots, most_)); }

  static std::uint64_t slot(std::uint64_t hash, std::size_t position) noexcept { return hash << 32 | (position + 1); }
  static std::size_t position(std::uint64_t slot) noexcept { return (slot & UINT32_MAX) - 1; }

  void prefetch(std::uint64_t hash) const noexcept { __builtin_prefetch(slots_.get() + (hash >> shift_), 1); }

  // The slot that holds the id, or the free one where it belongs.
  std::uint64_t& find(std::int64_t id, std::uint64_t hash, const std::int64_t* unique) noexcept {
    std::size_t at = hash >> shift_;
    while (slots_[at] != 0 && (((slots_[at] >> 32) ^ (hash & UINT32_MAX)) != 0 || unique[position(slots_[at])] != id)) {
      at = (at + 1) & mask_;
    }
    return slots_[at];
  }

  // Makes room for `more` ids beside those found. Grows to what the batch will need if it goes on as it began after `done` ids.
  void make_room(std::size_t more, std::size_t done, std::size_t batch, std::span<const std::int64_t> unique) {
    if ((unique.size() + more) * 2 <= mask_ + 1 || mask_ + 1 == most_) return;
    const double expected = static_cast<double>(unique.size()) / static_cast<double>(done) * static_cast<double>(batch);
    allocate(std::clamp(std::bit_ceil(static_cast<std::size_t>(expected * 2)), (mask_ + 1) * 2, most_));
    for (std::size_t i = 0; i < unique.size(); ++i) {
      constexpr std::size_t kAhead = 16;
      if (i + kAhead < unique.size()) prefetch(hash_id(unique[i + kAhead]));
      const std::uint64_t hash = hash_id(unique[i]);
      std::size_t at = hash >> shift_;
      while (slots_[at] != 0) at = (at + 1) & mask_;
      slots_[at] = slot(hash, i);
    }
  }

 private:
  static constexpr std::size_t kFirstSlots = 1u << 15;

  void allocate(std::size_t slots) {
    slots_ = make_huge_array<std::uint64_t>(slots);
    std::fill_n(slots_.get(), slots, 0u);
    mask_ = slots - 1;
    shift_ = 64 - std::countr_zero(slots);
  }

  const std::size_t most_;
  HugeArray<std::uint64_t> slots_;
  std::size_t mask_ = 0;
  int shift_ = 0;
};

}  // namespace

std::size_t unique_with_inverse(std::span<const std::int64_t> ids, std::span<std::int64_t> unique,
                                std::span<std::int64_t> inverse, std::span<std::int64_t> counts) {
  check_size("unique", unique.size(), ids.size());
  check_size("inverse", inverse.size(), ids.size());
  if (!counts.empty()) check_size("counts", counts.size(), ids.size());
  if (ids.size() >= UINT32_MAX) {
    throw InvalidArgument("ids has " + std::to_string(ids.size()) + " entries, expected fewer than 2^32 - 1; split the batch");
  }
  if (ids.empty()) return 0;

  UniqueTable table(ids.size());
  constexpr std::size_t kGroup = 32;
  std::uint64_t hashes[2 * kGroup];
  const auto prepare = [&](std::size_t begin) {
    for (std::size_t i = begin; i < std::min(begin + kGroup, ids.size()); ++i) {
      hashes[i % (2 * kGroup)] = hash_id(ids[i]);
      table.prefetch(hashes[i % (2 * kGroup)]);
    }
  };
  prepare(0);
  std::size_t found = 0;
  for (std::size_t begin = 0; begin < ids.size(); begin += kGroup) {
    const std::size_t end = std::min(begin + kGroup, ids.size());
    table.make_room(end - begin, begin, ids.size(), unique.first(found));
    prepare(end);
    for (std::size_t i = begin; i < end; ++i) {
      const std::int64_t id = ids[i];
      const std::uint64_t hash = hashes[i % (2 * kGroup)];
      std::uint64_t& slot = table.find(id, hash, unique.data());
      // New or not is a coin toss for many batches, so both cases do the same stores and there is nothing to mispredict.
      const bool is_new = slot == 0;
      unique[found] = id;
      const std::uint64_t kept = is_new ? UniqueTable::slot(hash, found) : slot;
      slot = kept;
      const std::size_t position = UniqueTable::position(kept);
      inverse[i] = static_cast<std::int64_t>(position);
      found += is_new;
      if (!counts.empty()) counts[position] = is_new ? 1 : counts[position] + 1;
    }
  }
  return found;
}

// ---- splits

namespace {

// Turns part sizes into the places where each part begins.
void starts_of(std::span<const std::int64_t> sizes, std::vector<std::int64_t>& starts) {
  std::int64_t total = 0;
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    starts[part] = total;
    total += sizes[part];
  }
}

void check_parts(std::size_t parts) {
  if (parts == 0 || parts > UINT32_MAX) {
    throw InvalidArgument("the number of shards is " + std::to_string(parts) + ", expected 1..4294967295");
  }
}

// a % divisor for any unsigned a without the division: one multiplication gives a quotient that is at most one too small.
class Remainder {
 public:
  explicit Remainder(std::uint64_t divisor) noexcept : divisor_(divisor), inverse_(UINT64_MAX / divisor) {}

  std::uint64_t operator()(std::uint64_t a) const noexcept {
    const auto quotient = static_cast<std::uint64_t>((static_cast<unsigned __int128>(a) * inverse_) >> 64);
    const std::uint64_t rest = a - quotient * divisor_;
    return rest >= divisor_ ? rest - divisor_ : rest;
  }

 private:
  std::uint64_t divisor_;
  std::uint64_t inverse_;
};

}  // namespace

void split_by_indices(std::span<const std::int64_t> indices, std::span<std::int64_t> order, std::span<std::int64_t> sizes) {
  check_size("order", order.size(), indices.size());
  check_parts(sizes.size());
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (static_cast<std::uint64_t>(indices[i]) < sizes.size()) continue;
    throw InvalidArgument("indices[" + std::to_string(i) + "] is " + std::to_string(indices[i]) + ", expected 0.." +
                          std::to_string(sizes.size() - 1) + ", the number of the part the item goes to");
  }
  std::vector<std::int64_t> next(sizes.size());
  std::fill(sizes.begin(), sizes.end(), 0);
  for (const std::int64_t index : indices) ++sizes[index];
  starts_of(sizes, next);
  for (std::size_t i = 0; i < indices.size(); ++i) order[next[indices[i]]++] = static_cast<std::int64_t>(i);
}

void split_by_shard(std::span<const std::int64_t> ids, std::span<std::int64_t> order, std::span<std::int64_t> sizes,
                    std::span<std::int64_t> grouped_ids) {
  check_size("order", order.size(), ids.size());
  check_parts(sizes.size());
  if (!grouped_ids.empty()) check_size("grouped_ids", grouped_ids.size(), ids.size());
  std::vector<std::int64_t> next(sizes.size());
  const auto shards = std::make_unique_for_overwrite<std::uint32_t[]>(ids.size());
  std::fill(sizes.begin(), sizes.end(), 0);
  const Remainder shard_of(sizes.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    shards[i] = static_cast<std::uint32_t>(shard_of(static_cast<std::uint64_t>(ids[i])));
    ++sizes[shards[i]];
  }
  starts_of(sizes, next);
  if (grouped_ids.empty()) {
    for (std::size_t i = 0; i < ids.size(); ++i) order[next[shards[i]]++] = static_cast<std::int64_t>(i);
    return;
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t place = next[shards[i]]++;
    order[place] = static_cast<std::int64_t>(i);
    grouped_ids[place] = ids[i];
  }
}

void split_ragged_by_indices(std::span<const std::int64_t> indices, std::span<const std::int64_t> row_splits,
                             std::span<std::int64_t> order, std::span<std::int64_t> sizes,
                             std::span<std::int64_t> part_splits) {
  check_row_splits(row_splits, indices.size());
  check_size("part_splits", part_splits.size(), sizes.size() * row_splits.size());
  split_by_indices(indices, order, sizes);
  const std::size_t rows = rows_of(row_splits);
  std::fill(part_splits.begin(), part_splits.end(), 0);
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::int64_t value = row_splits[row]; value < row_splits[row + 1]; ++value) {
      ++part_splits[indices[value] * (rows + 1) + row + 1];
    }
  }
  for (std::size_t part = 0; part < sizes.size(); ++part) {
    std::int64_t* splits = part_splits.data() + part * (rows + 1);
    for (std::size_t row = 0; row < rows; ++row) splits[row + 1] += splits[row];
  }
}

namespace {

void check_order(std::span<const std::int64_t> order, std::size_t num_rows) {
  for (std::size_t k = 0; k < order.size(); ++k) {
    if (static_cast<std::uint64_t>(order[k]) < num_rows) continue;
    throw InvalidArgument("order[" + std::to_string(k) + "] is " + std::to_string(order[k]) + ", expected 0.." +
                          std::to_string(static_cast<std::int64_t>(num_rows) - 1) + ", the number of a row");
  }
}

// Rows of the usual sizes are copied by code that knows their size.
template <typename Copy>
void with_row_bytes(std::size_t row_bytes, Copy copy) {
  switch (row_bytes) {
    case 0: return;
    case 4: return copy(std::integral_constant<std::size_t, 4>{});
    case 8: return copy(std::integral_constant<std::size_t, 8>{});
    case 32: return copy(std::integral_constant<std::size_t, 32>{});
    case 64: return copy(std::integral_constant<std::size_t, 64>{});
    case 128: return copy(std::integral_constant<std::size_t, 128>{});
    default: return copy(row_bytes);
  }
}

}  // namespace

void restore_order(const void* grouped, std::size_t row_bytes, std::span<const std::int64_t> order, void* out) {
  check_order(order, order.size());
  std::vector<bool> seen(order.size());
  for (std::size_t k = 0; k < order.size(); ++k) {
    if (seen[order[k]]) {
      throw InvalidArgument("order[" + std::to_string(k) + "] is " + std::to_string(order[k]) +
                            " again, expected a permutation: each row number once");
    }
    seen[order[k]] = true;
  }
  const auto* from = static_cast<const std::byte*>(grouped);
  auto* to = static_cast<std::byte*>(out);
  with_row_bytes(row_bytes, [&](auto bytes) {
    for (std::size_t k = 0; k < order.size(); ++k) std::memcpy(to + order[k] * bytes, from + k * bytes, bytes);
  });
}

void gather_rows(const void* rows, std::size_t num_rows, std::size_t row_bytes, std::span<const std::int64_t> order,
                 void* out) {
  check_order(order, num_rows);
  const auto* from = static_cast<const std::byte*>(rows);
  auto* to = static_cast<std::byte*>(out);
  with_row_bytes(row_bytes, [&](auto bytes) {
    for (std::size_t k = 0; k < order.size(); ++k) std::memcpy(to + k * bytes, from + order[k] * bytes, bytes);
  });
}

}  // namespace monolith
