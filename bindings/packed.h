// Requests to several tables in the packed form: the ids of all tables lie behind each other in one array, those of the first table
// first, and `places` says where the vectors of each table are.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "monolith/config.h"
#include "monolith/error.h"

namespace packed {

namespace nb = nanobind;
using monolith::InvalidArgument;
using monolith::Pooling;

using Ids = InVector<std::int64_t>;
using Rates = InVector<float>;
// Vectors of tables: rows of any distance, as in a slice of a larger array.
using Outputs = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Gradients = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
// uint8 [tables]: a Pooling each.
using Poolings = InVector<std::uint8_t>;
// int64 [tables, 4]: number of bags, index of the array with their vectors (-1: none), and the row and column where they begin.
using Places = nb::ndarray<const std::int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;

inline void require_count(const char* name, std::size_t expected, std::size_t got) {
  if (expected == got) return;
  throw InvalidArgument(std::string(name) + ": expected " + std::to_string(expected) + ", one per table, got " +
                        std::to_string(got));
}

inline std::string shape_of(std::size_t rows, std::size_t columns) {
  return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

// The first of `bags` vectors of a table in `array`, and the distance of one to the next.
template <typename Array>
auto vectors(const char* name, std::string_view table, std::size_t dim, const Array& array, std::size_t bags, std::int64_t row = 0,
             std::int64_t column = 0) {
  const bool fits = row >= 0 && column >= 0 && static_cast<std::size_t>(row) + bags <= array.shape(0) &&
                    static_cast<std::size_t>(column) + dim <= array.shape(1);
  if (!fits) {
    throw InvalidArgument("table '" + std::string(table) + "': " + name + ": expected " + shape_of(bags, dim) + ", got " +
                          shape_of(array.shape(0), array.shape(1)));
  }
  if (bags == 0) return std::pair(array.data(), dim);
  if (array.shape(1) > 1 && array.stride(1) != 1) {
    throw InvalidArgument("table '" + std::string(table) + "': " + name + ": expected rows without gaps inside");
  }
  // A gradient that was expanded has the same row again and again, a distance of 0.
  if (array.shape(0) > 1 && array.stride(0) < 0) throw InvalidArgument(std::string(name) + ": expected rows in ascending order");
  const auto stride = static_cast<std::size_t>(array.shape(0) > 1 ? array.stride(0) : 0);
  return std::pair(array.data() + static_cast<std::size_t>(row) * stride + column, stride);
}

inline Pooling pooling_of(const Poolings& poolings, std::size_t table) {
  const std::uint8_t pooling = poolings.data()[table];
  if (pooling > static_cast<std::uint8_t>(Pooling::kSqrtN)) throw InvalidArgument("poolings: there is no such pooling");
  return static_cast<Pooling>(pooling);
}

// Ids and offsets of one table.
struct Bags {
  std::span<const std::int64_t> ids;
  std::span<const std::int64_t> offsets;
  std::size_t count;
};

inline std::vector<Bags> bags_of(std::size_t tables, const Ids& ids, const std::optional<Ids>& offsets, const Places& places) {
  require_count("places", tables, places.shape(0));
  const auto refuse = [&](const char* name, std::size_t got) {
    throw InvalidArgument(std::string(name) + ": expected those of the bags in `places`, got " + std::to_string(got));
  };
  std::vector<Bags> bags(tables);
  std::size_t first_bag = 0, first_id = 0;
  for (std::size_t t = 0; t < tables; ++t) {
    const std::int64_t wanted = places.data()[t * 4];
    const std::size_t left = offsets ? offsets->size() - first_bag : ids.size() - first_id;
    if (wanted < 0 || static_cast<std::uint64_t>(wanted) + (offsets ? 1 : 0) > left) {
      refuse(offsets ? "offsets" : "ids", offsets ? offsets->size() : ids.size());
    }
    const auto count = static_cast<std::size_t>(wanted);
    std::size_t num_ids = count;
    if (offsets) {
      bags[t].offsets = as_span(*offsets).subspan(first_bag, count + 1);
      const std::int64_t begin = bags[t].offsets.front(), end = bags[t].offsets.back();
      if (begin != static_cast<std::int64_t>(first_id) || end < begin || static_cast<std::uint64_t>(end) > ids.size()) {
        refuse("offsets", offsets->size());
      }
      num_ids = static_cast<std::size_t>(end - begin);
    }
    bags[t].ids = as_span(ids).subspan(first_id, num_ids);
    bags[t].count = count;
    first_bag += count;
    first_id += num_ids;
  }
  if (first_id != ids.size()) refuse("ids", ids.size());
  return bags;
}

}  // namespace packed
