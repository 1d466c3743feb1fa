#include "monolith/placed_rows.h"

#include <cstring>
#include <string>

#include "cpu_features.h"
#include "float_vectors.h"
#include "monolith/error.h"
#include "monolith/ragged.h"

namespace monolith {
namespace {

// As in ragged.cc: the bodies are inlined into one function per instruction set, and only add, so all give the same bits. Adding
// one float at a time took nearly three times as long.
#define MONOLITH_INLINE inline __attribute__((always_inline))

struct Bags {
  const std::int64_t* places;
  const std::int64_t* row_splits;
  std::size_t count;
};

template <typename Vector>
MONOLITH_INLINE void add(float* to, const float* from, std::size_t dim) noexcept {
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(float);
  const std::size_t whole = dim / kLanes * kLanes;
  Vector sum, x;
  for (std::size_t k = 0; k < whole; k += kLanes) {
    load(sum, to + k);
    load(x, from + k);
    sum += x;
    store(sum, to + k);
  }
  for (std::size_t k = whole; k < dim; ++k) to[k] += from[k];
}

template <typename Vector>
MONOLITH_INLINE void pool_bags(const float* rows, const Bags& bags, std::size_t dim, float* out) noexcept {
  for (std::size_t bag = 0; bag < bags.count; ++bag, out += dim) {
    for (std::size_t k = 0; k < dim; ++k) out[k] = 0.0f;
    const std::int64_t end = bags.row_splits[bag + 1];
    for (std::int64_t i = bags.row_splits[bag]; i < end; ++i) add<Vector>(out, rows + bags.places[i] * dim, dim);
  }
}

template <typename Vector>
MONOLITH_INLINE void sum_bags(const float* grads, const Bags& bags, std::size_t dim, float* out) noexcept {
  for (std::size_t bag = 0; bag < bags.count; ++bag, grads += dim) {
    const std::int64_t end = bags.row_splits[bag + 1];
    for (std::int64_t i = bags.row_splits[bag]; i < end; ++i) add<Vector>(out + bags.places[i] * dim, grads, dim);
  }
}

// Does not leave the loop early, so that it vectorises.
MONOLITH_INLINE bool any_place_outside(const std::int64_t* places, std::size_t count, std::int64_t rows) noexcept {
  std::int64_t outside = 0;
  for (std::size_t i = 0; i < count; ++i) outside |= (places[i] < 0) | (places[i] >= rows);
  return outside != 0;
}

// Rows of the usual sizes go through code that knows their size.
template <typename Vector>
MONOLITH_INLINE void pool_by_dim(const float* rows, const Bags& bags, std::size_t dim, float* out) noexcept {
  switch (dim) {
    case 8: return pool_bags<Vector>(rows, bags, 8, out);
    case 16: return pool_bags<Vector>(rows, bags, 16, out);
    case 32: return pool_bags<Vector>(rows, bags, 32, out);
    case 64: return pool_bags<Vector>(rows, bags, 64, out);
    default: return pool_bags<Vector>(rows, bags, dim, out);
  }
}

template <typename Vector>
MONOLITH_INLINE void sum_by_dim(const float* grads, const Bags& bags, std::size_t dim, float* out) noexcept {
  switch (dim) {
    case 8: return sum_bags<Vector>(grads, bags, 8, out);
    case 16: return sum_bags<Vector>(grads, bags, 16, out);
    case 32: return sum_bags<Vector>(grads, bags, 32, out);
    case 64: return sum_bags<Vector>(grads, bags, 64, out);
    default: return sum_bags<Vector>(grads, bags, dim, out);
  }
}

bool outside_baseline(const std::int64_t* places, std::size_t count, std::int64_t rows) noexcept {
  return any_place_outside(places, count, rows);
}
void pool_baseline(const float* rows, const Bags& bags, std::size_t dim, float* out) noexcept {
  pool_by_dim<Vector4>(rows, bags, dim, out);
}
void sum_baseline(const float* grads, const Bags& bags, std::size_t dim, float* out) noexcept {
  sum_by_dim<Vector4>(grads, bags, dim, out);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) bool outside_avx2(const std::int64_t* places, std::size_t count,
                                                  std::int64_t rows) noexcept {
  return any_place_outside(places, count, rows);
}
__attribute__((target("avx2"))) void pool_avx2(const float* rows, const Bags& bags, std::size_t dim, float* out) noexcept {
  pool_by_dim<Vector8>(rows, bags, dim, out);
}
__attribute__((target("avx2"))) void sum_avx2(const float* grads, const Bags& bags, std::size_t dim, float* out) noexcept {
  sum_by_dim<Vector8>(grads, bags, dim, out);
}
#endif

#undef MONOLITH_INLINE

using Kernel = void (*)(const float*, const Bags&, std::size_t, float*) noexcept;
struct Kernels {
  bool (*any_outside)(const std::int64_t*, std::size_t, std::int64_t) noexcept;
  Kernel pool;
  Kernel sum;
};

const Kernels& kernels() noexcept {
  static const Kernels chosen = [] {
#if defined(__x86_64__)
    if (cpu_features().avx2) return Kernels{outside_avx2, pool_avx2, sum_avx2};
#endif
    return Kernels{outside_baseline, pool_baseline, sum_baseline};
  }();
  return chosen;
}

void check(std::span<const std::int64_t> places, std::span<const std::int64_t> row_splits, std::size_t dim, const char* by_row,
           std::size_t row_floats, const char* by_bag, std::size_t bag_floats) {
  if (dim == 0) throw InvalidArgument("dim is 0, expected at least 1");
  check_row_splits(row_splits, places.size());
  const std::size_t rows = row_floats / dim;
  if (rows * dim != row_floats) {
    throw InvalidArgument(std::string(by_row) + " has " + std::to_string(row_floats) + " entries, expected a multiple of " +
                          std::to_string(dim));
  }
  if (bag_floats != (row_splits.size() - 1) * dim) {
    throw InvalidArgument(std::string(by_bag) + " has " + std::to_string(bag_floats) + " entries, expected " +
                          std::to_string((row_splits.size() - 1) * dim));
  }
  if (!kernels().any_outside(places.data(), places.size(), static_cast<std::int64_t>(rows))) return;
  for (std::size_t i = 0; i < places.size(); ++i) {
    if (static_cast<std::uint64_t>(places[i]) < rows) continue;
    throw InvalidArgument("places[" + std::to_string(i) + "] is " + std::to_string(places[i]) + ", expected 0.." +
                          std::to_string(static_cast<std::int64_t>(rows) - 1) + ", the number of a row");
  }
}

}  // namespace

void pool_places(std::span<const float> rows, std::span<const std::int64_t> places, std::span<const std::int64_t> row_splits,
                 std::size_t dim, std::span<float> out) {
  check(places, row_splits, dim, "rows", rows.size(), "out", out.size());
  kernels().pool(rows.data(), Bags{places.data(), row_splits.data(), row_splits.size() - 1}, dim, out.data());
}

void sum_places(std::span<const float> grads, std::span<const std::int64_t> places, std::span<const std::int64_t> row_splits,
                std::size_t dim, std::span<float> out) {
  check(places, row_splits, dim, "out", out.size(), "grads", grads.size());
  if (!out.empty()) std::memset(out.data(), 0, out.size_bytes());
  kernels().sum(grads.data(), Bags{places.data(), row_splits.data(), row_splits.size() - 1}, dim, out.data());
}

}  // namespace monolith
