#include "monolith/ragged.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "arrays.h"
#include "module.h"
#include "monolith/error.h"
#include "monolith/fids.h"
#include "monolith/placed_rows.h"
#include "unlocked.h"

namespace nb = nanobind;
using Ids = InVector<std::int64_t>;
using OutIds = OutVector<std::int64_t>;
using Bytes = InMatrix<std::uint8_t>;
using OutBytes = nb::ndarray<std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using monolith::Reduction;

namespace {

OutIds stack_fids(const std::vector<Ids>& columns, const std::vector<std::int64_t>& slots) {
  std::vector<std::span<const std::int64_t>> spans;
  spans.reserve(columns.size());
  for (const Ids& column : columns) spans.push_back(as_span(column));
  Buffer<std::int64_t> fids(columns.empty() ? 0 : columns.size() * columns[0].size());
  {
    const Unlocked unlocked;
    monolith::stack_fids(spans, slots, fids.span());
  }
  return std::move(fids).vector();
}

void put_slots(const nb::ndarray<std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& ids, const Ids& slots, bool by_row) {
  const Unlocked unlocked;
  monolith::put_slots(as_span(ids), ids.shape(1), as_span(slots), by_row);
}

// Sized by the values the caller really has, never by the last row split, which is not checked yet.
OutIds value_rowids(const Ids& row_splits, std::size_t num_values) {
  Buffer<std::int64_t> rowids(num_values);
  {
    const Unlocked unlocked;
    monolith::value_rowids(as_span(row_splits), rowids.span());
  }
  return std::move(rowids).vector();
}

OutMatrix<float> pool(Reduction reduction, const InMatrix<float>& rows, const Ids& row_splits) {
  const std::size_t dim = rows.shape(1);
  const std::size_t bags = row_splits.size() == 0 ? 0 : row_splits.size() - 1;
  Buffer<float> pooled(bags * dim);
  {
    const Unlocked unlocked;
    monolith::pool(reduction, as_span(rows), as_span(row_splits), dim, pooled.span());
  }
  return std::move(pooled).matrix(bags, dim);
}

OutMatrix<float> pool_gradient(Reduction reduction, const InMatrix<float>& grad_out, const InMatrix<float>& rows,
                               const InMatrix<float>& pooled, const Ids& row_splits, std::size_t num_values) {
  const std::size_t dim = grad_out.shape(1);
  Buffer<float> grad_rows(num_values * dim);
  {
    const Unlocked unlocked;
    monolith::pool_gradient(reduction, as_span(grad_out), as_span(rows), as_span(pooled), as_span(row_splits), dim,
                            grad_rows.span());
  }
  return std::move(grad_rows).matrix(num_values, dim);
}

std::tuple<OutIds, OutIds, OutIds> unique_with_inverse(const Ids& ids, bool with_counts) {
  Buffer<std::int64_t> unique(ids.size());
  Buffer<std::int64_t> inverse(ids.size());
  Buffer<std::int64_t> counts(with_counts ? ids.size() : 0);
  std::size_t found = 0;
  {
    const Unlocked unlocked;
    found = monolith::unique_with_inverse(as_span(ids), unique.span(), inverse.span(), counts.span());
  }
  return {std::move(unique).vector(found), std::move(inverse).vector(),
          std::move(counts).vector(with_counts ? found : 0)};
}

std::tuple<OutIds, OutIds, OutIds> split_by_shard(const Ids& ids, std::size_t num_shards) {
  Buffer<std::int64_t> order(ids.size());
  Buffer<std::int64_t> sizes(num_shards);
  Buffer<std::int64_t> grouped(ids.size());
  {
    const Unlocked unlocked;
    monolith::split_by_shard(as_span(ids), order.span(), sizes.span(), grouped.span());
  }
  return {std::move(grouped).vector(), std::move(order).vector(), std::move(sizes).vector()};
}

std::tuple<OutIds, OutIds> split_by_indices(const Ids& indices, std::size_t num_parts) {
  Buffer<std::int64_t> order(indices.size());
  Buffer<std::int64_t> sizes(num_parts);
  {
    const Unlocked unlocked;
    monolith::split_by_indices(as_span(indices), order.span(), sizes.span());
  }
  return {std::move(order).vector(), std::move(sizes).vector()};
}

std::tuple<OutIds, OutIds, OutMatrix<std::int64_t>> split_ragged_by_indices(const Ids& indices, const Ids& row_splits,
                                                                            std::size_t num_parts) {
  Buffer<std::int64_t> order(indices.size());
  Buffer<std::int64_t> sizes(num_parts);
  Buffer<std::int64_t> part_splits(num_parts * row_splits.size());
  {
    const Unlocked unlocked;
    monolith::split_ragged_by_indices(as_span(indices), as_span(row_splits), order.span(), sizes.span(),
                                      part_splits.span());
  }
  return {std::move(order).vector(), std::move(sizes).vector(),
          std::move(part_splits).matrix(num_parts, row_splits.size())};
}

void check_rows(const char* field, std::size_t rows, std::size_t expected) {
  if (rows == expected) return;
  throw monolith::InvalidArgument(std::string(field) + " has " + std::to_string(rows) + " rows, expected " +
                                  std::to_string(expected) + ", one per entry of order");
}

void restore_order(const Bytes& grouped, const Ids& order, const OutBytes& out) {
  check_rows("grouped", grouped.shape(0), order.size());
  check_rows("out", out.shape(0), order.size());
  if (out.shape(1) != grouped.shape(1)) throw monolith::InvalidArgument("out and grouped have rows of different sizes");
  const Unlocked unlocked;
  monolith::restore_order(grouped.data(), grouped.shape(1), as_span(order), out.data());
}

void gather_rows(const Bytes& rows, const Ids& order, const OutBytes& out) {
  check_rows("out", out.shape(0), order.size());
  if (out.shape(1) != rows.shape(1)) throw monolith::InvalidArgument("out and rows have rows of different sizes");
  const Unlocked unlocked;
  monolith::gather_rows(rows.data(), rows.shape(0), rows.shape(1), as_span(order), out.data());
}

using OutFloats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_columns(std::size_t columns, std::size_t expected) {
  if (columns == expected) return;
  throw monolith::InvalidArgument("out has " + std::to_string(columns) + " columns, expected " + std::to_string(expected));
}

void pool_places(const InMatrix<float>& rows, const Ids& places, const Ids& row_splits, const OutFloats& out) {
  check_columns(out.shape(1), rows.shape(1));
  const Unlocked unlocked;
  monolith::pool_places(as_span(rows), as_span(places), as_span(row_splits), rows.shape(1), as_span(out));
}

void sum_places(const InMatrix<float>& grads, const Ids& places, const Ids& row_splits, const OutFloats& out) {
  check_columns(out.shape(1), grads.shape(1));
  const Unlocked unlocked;
  monolith::sum_places(as_span(grads), as_span(places), as_span(row_splits), grads.shape(1), as_span(out));
}

}  // namespace

void init_ragged(nb::module_& m) {
  nb::enum_<Reduction>(m, "Reduction")
      .value("SUM", Reduction::kSum)
      .value("MEAN", Reduction::kMean)
      .value("SQRTN", Reduction::kSqrtN)
      .value("L2", Reduction::kL2);
  m.def(
      "check_row_splits",
      [](const Ids& row_splits, std::size_t num_values) {
        const Unlocked unlocked;
        monolith::check_row_splits(as_span(row_splits), num_values);
      },
      nb::arg("row_splits").noconvert(), nb::arg("num_values"));
  m.def("stack_fids", &stack_fids, nb::arg("columns"), nb::arg("slots"),
        "The fids of columns of equal length, row by row; a negative slot leaves ids as they are.");
  m.def("put_slots", &put_slots, nb::arg("ids").noconvert(), nb::arg("slots").noconvert(), nb::arg("by_row"),
        "Replace ids [rows, columns] by their fids, with a slot for each row or each column; a negative slot leaves them as they are.");
  m.def("value_rowids", &value_rowids, nb::arg("row_splits").noconvert(), nb::arg("num_values"));
  m.def("pool", &pool, nb::arg("reduction"), nb::arg("rows").noconvert(), nb::arg("row_splits").noconvert());
  m.def("pool_gradient", &pool_gradient, nb::arg("reduction"), nb::arg("grad_out").noconvert(), nb::arg("rows").noconvert(), nb::arg("pooled").noconvert(),
        nb::arg("row_splits").noconvert(), nb::arg("num_values"));
  m.def("unique_with_inverse", &unique_with_inverse, nb::arg("ids").noconvert(), nb::arg("with_counts") = false,
        "(unique, inverse, counts); counts is empty unless asked for.");
  m.def("split_by_shard", &split_by_shard, nb::arg("ids").noconvert(), nb::arg("num_shards"), "(grouped ids, order, shard sizes)");
  m.def("split_by_indices", &split_by_indices, nb::arg("indices").noconvert(), nb::arg("num_parts"), "(order, part sizes)");
  m.def("split_ragged_by_indices", &split_ragged_by_indices, nb::arg("indices").noconvert(), nb::arg("row_splits").noconvert(),
        nb::arg("num_parts"), "(order, part sizes, row splits of each part)");
  m.def("restore_order", &restore_order, nb::arg("grouped").noconvert(), nb::arg("order").noconvert(), nb::arg("out").noconvert());
  m.def("pool_places", &pool_places, nb::arg("rows").noconvert(), nb::arg("places").noconvert(), nb::arg("row_splits").noconvert(),
        nb::arg("out").noconvert(), "out[bag] = the sum of rows[places[i]] over the ids i of the bag.");
  m.def("sum_places", &sum_places, nb::arg("grads").noconvert(), nb::arg("places").noconvert(), nb::arg("row_splits").noconvert(),
        nb::arg("out").noconvert(), "out[place] = the sum of grads[bag] over the ids with this place.");
  m.def("gather_rows", &gather_rows, nb::arg("rows").noconvert(), nb::arg("order").noconvert(), nb::arg("out").noconvert());
}
