// The table and its configuration. Python passes most output arrays in; others own what the core allocated. Nothing is copied.
#include "monolith/table.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include "arrays.h"
#include "module.h"
#include "monolith/bucket_scan.h"
#include "monolith/error.h"
#include "monolith/table_file.h"
#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::ChangeBatch;
using monolith::Pooling;
using monolith::RowBatch;
using monolith::Table;
using monolith::UpdateOptions;

namespace {

using Ids = InVector<std::int64_t>;
using Matrix = InMatrix<float>;
// Arrays of the caller that the core writes into.
template <typename T>
using Target = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using TargetMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require_shape(const char* name, std::size_t rows, std::size_t columns, std::size_t got_rows, std::size_t got_columns) {
  if (rows == got_rows && columns == got_columns) return;
  throw monolith::InvalidArgument(std::string(name) + ": expected shape [" + std::to_string(rows) + ", " +
                                  std::to_string(columns) + "], got [" + std::to_string(got_rows) + ", " +
                                  std::to_string(got_columns) + "]");
}

template <typename Array>
void require_shape(const char* name, std::size_t rows, std::size_t columns, const Array& array) {
  require_shape(name, rows, columns, array.shape(0), array.shape(1));
}

// Raw rows: [n, row_bytes].
using Rows = InMatrix<std::uint8_t>;
std::span<const std::byte> bytes_of(const Rows& rows) { return std::as_bytes(as_span(rows)); }

// Arrays over the memory of a batch, which `owner` keeps.
std::tuple<OutVector<std::int64_t>, OutVector<std::uint32_t>, OutMatrix<std::uint8_t>> arrays_of(RowBatch& batch,
                                                                                               std::size_t row_bytes,
                                                                                               const nb::capsule& owner) {
  const std::size_t n = batch.ids.size();
  return {OutVector<std::int64_t>(batch.ids.data(), {n}, owner), OutVector<std::uint32_t>(batch.times.data(), {n}, owner),
          OutMatrix<std::uint8_t>(reinterpret_cast<std::uint8_t*>(batch.rows.data()), {n, row_bytes}, owner)};
}

// Optimizer state: one array [n, width] for each of slot_infos().
using SlotArray = nb::ndarray<nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstSlotArray = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename Array>
void require_slots(const Table& table, std::size_t n, const std::vector<Array>& slots) {
  const auto infos = table.slot_infos();
  require_shape("slots", infos.size(), 1, slots.size(), 1);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    require_shape(infos[i].name.c_str(), n, infos[i].width, slots[i]);
    if (slots[i].dtype() != (infos[i].is_int64 ? nb::dtype<std::int64_t>() : nb::dtype<float>())) {
      throw monolith::InvalidArgument(infos[i].name + ": wrong dtype");
    }
  }
}

std::tuple<std::uint32_t, std::uint32_t, std::vector<float>> as_tuple(const Table::State& state) {
  return {state.max_event_time, state.updates, state.hashnet_scales};
}

void init_config(nb::module_& m) {
  using namespace monolith;
  nb::enum_<InitializerKind>(m, "InitializerKind")
      .value("CONSTANT", InitializerKind::kConstant)
      .value("UNIFORM", InitializerKind::kUniform)
      .value("NORMAL", InitializerKind::kNormal)
      .value("TRUNCATED_NORMAL", InitializerKind::kTruncatedNormal);
  nb::enum_<OptimizerKind>(m, "OptimizerKind")
      .value("SGD", OptimizerKind::kSgd)
      .value("MOMENTUM", OptimizerKind::kMomentum)
      .value("ADAGRAD", OptimizerKind::kAdagrad)
      .value("DYNAMIC_WD_ADAGRAD", OptimizerKind::kDynamicWdAdagrad)
      .value("ROWWISE_ADAGRAD", OptimizerKind::kRowwiseAdagrad)
      .value("ADADELTA", OptimizerKind::kAdadelta)
      .value("ADAM", OptimizerKind::kAdam)
      .value("AMSGRAD", OptimizerKind::kAmsgrad)
      .value("ADAMOM", OptimizerKind::kAdamom)
      .value("RMSPROP", OptimizerKind::kRmsprop)
      .value("RMSPROP_V2", OptimizerKind::kRmspropV2)
      .value("FTRL", OptimizerKind::kFtrl)
      .value("GROUP_FTRL", OptimizerKind::kGroupFtrl)
      .value("GROUP_ADAGRAD", OptimizerKind::kGroupAdagrad)
      .value("MOVING_AVERAGE", OptimizerKind::kMovingAverage)
      .value("BATCH_SOFTMAX", OptimizerKind::kBatchSoftmax);
  nb::enum_<Precision>(m, "Precision")
      .value("FP32", Precision::kFp32)
      .value("FP16", Precision::kFp16)
      .value("BF16", Precision::kBf16);
  nb::enum_<CompressorKind>(m, "CompressorKind")
      .value("FP32", CompressorKind::kFp32)
      .value("FP16", CompressorKind::kFp16)
      .value("BF16", CompressorKind::kBf16)
      .value("FIXED_R8", CompressorKind::kFixedR8)
      .value("ONE_BIT", CompressorKind::kOneBit);
  nb::class_<Initializer>(m, "Initializer")
      .def(nb::init<>())
      .def_rw("kind", &Initializer::kind)
      .def_rw("a", &Initializer::a)
      .def_rw("b", &Initializer::b);
  nb::class_<Optimizer>(m, "Optimizer")
      .def(nb::init<>())
      .def_rw("kind", &Optimizer::kind)
      .def_rw("initial_accumulator", &Optimizer::initial_accumulator)
      .def_rw("weight_decay", &Optimizer::weight_decay)
      .def_rw("epsilon", &Optimizer::epsilon)
      .def_rw("momentum", &Optimizer::momentum)
      .def_rw("beta1", &Optimizer::beta1)
      .def_rw("beta2", &Optimizer::beta2)
      .def_rw("l1", &Optimizer::l1)
      .def_rw("l2", &Optimizer::l2)
      .def_rw("nesterov", &Optimizer::nesterov)
      .def_rw("decouple_weight_decay", &Optimizer::decouple_weight_decay)
      .def_rw("delay_compensation", &Optimizer::delay_compensation);
  nb::class_<Compressor>(m, "Compressor")
      .def(nb::init<>())
      .def_rw("kind", &Compressor::kind)
      .def_rw("range", &Compressor::range)
      .def_rw("amplitude", &Compressor::amplitude)
      .def_rw("init_scale", &Compressor::init_scale)
      .def_rw("max_scale", &Compressor::max_scale)
      .def_rw("step_size", &Compressor::step_size);
  nb::class_<Segment>(m, "Segment")
      .def(nb::init<>())
      .def_rw("dim", &Segment::dim)
      .def_rw("initializer", &Segment::initializer)
      .def_rw("optimizer", &Segment::optimizer)
      .def_rw("precision", &Segment::precision)
      .def_rw("stochastic_rounding", &Segment::stochastic_rounding)
      .def_rw("compressor", &Segment::compressor);
  nb::class_<TableConfig>(m, "TableConfig")
      .def(nb::init<>())
      .def_rw("name", &TableConfig::name)
      .def_rw("segments", &TableConfig::segments)
      .def_rw("seed", &TableConfig::seed)
      .def_prop_rw(
          "serving", [](const TableConfig& self) { return self.mode == Mode::kServing; },
          [](TableConfig& self, bool serving) { self.mode = serving ? Mode::kServing : Mode::kTraining; })
      .def_rw("unseen_reads_zeros", &TableConfig::unseen_reads_zeros)
      .def_rw("skip_zero_rows", &TableConfig::skip_zero_rows)
      .def_rw("initial_capacity", &TableConfig::initial_capacity)
      .def_rw("default_expiry_seconds", &TableConfig::default_expiry_seconds)
      .def_rw("slot_expiry_seconds", &TableConfig::slot_expiry_seconds);
}

UpdateOptions update_options(const InVector<float>& learning_rates, std::int64_t step, std::uint32_t event_time) {
  UpdateOptions options;
  options.learning_rates = as_span(learning_rates);
  options.step = step;
  options.event_time = event_time;
  return options;
}

void def_reads(nb::class_<Table>& table) {
  table
      .def(
          "lookup",
          [](const Table& self, const Ids& ids, const TargetMatrix& out) {
            require_shape("out", ids.size(), self.dim(), out);
            const Unlocked unlocked;
            self.lookup(as_span(ids), out.data());
          },
          "ids"_a.noconvert(), "out"_a.noconvert())
      .def(
          "lookup_pooled",
          [](const Table& self, const Ids& ids, const Ids& row_splits, Pooling pooling, const TargetMatrix& out) {
            require_shape("out", row_splits.size() == 0 ? 0 : row_splits.size() - 1, self.dim(), out);
            const Unlocked unlocked;
            self.lookup_pooled(as_span(ids), as_span(row_splits), pooling, out.data());
          },
          "ids"_a.noconvert(), "row_splits"_a.noconvert(), "pooling"_a, "out"_a.noconvert())
      .def(
          "contains",
          [](const Table& self, const Ids& ids, const Target<bool>& found) {
            require_shape("found", ids.size(), 1, found.size(), 1);
            const Unlocked unlocked;
            self.contains(as_span(ids), found.data());
          },
          "ids"_a.noconvert(), "found"_a.noconvert())
      .def(
          "copy_rows",
          [](const Table& self, const Ids& ids, const Target<bool>& found, RowBatch& batch) {
            require_shape("found", ids.size(), 1, found.size(), 1);
            const Unlocked unlocked;
            self.copy_rows(as_span(ids), found.data(), batch);
          },
          "ids"_a.noconvert(), "found"_a.noconvert(), "batch"_a)
      .def("scan", &Table::scan, "cursor"_a, "batch"_a, nb::call_guard<Unlocked>(),
           "Appends the rows of one index block to the batch; False when there was nothing left.")
      .def(
          "rows_of_buckets",
          [](const Table& self, std::uint32_t first, std::uint32_t last) {
            auto batch = std::make_unique<RowBatch>();
            {
              const Unlocked unlocked;
              monolith::BucketScan scan(self, {first, last});
              while (scan.next(*batch)) {
              }
            }
            RowBatch& rows = *batch;
            return arrays_of(rows, self.row_bytes(), keep(std::move(batch)));
          },
          "first_bucket"_a, "last_bucket"_a, "Ids, times and rows of these buckets.")
      .def(
          "decode",
          [](const Table& self, const Rows& rows, const TargetMatrix& values, const std::vector<SlotArray>& slots) {
            const std::size_t n = rows.shape(0);
            require_shape("rows", n, self.row_bytes(), rows);
            require_shape("values", n, self.dim(), values);
            require_slots(self, n, slots);
            monolith::EntryArrays arrays{values.data(), {}};
            for (const SlotArray& slot : slots) arrays.slots.push_back(slot.data());
            const Unlocked unlocked;
            self.decode(bytes_of(rows), arrays);
          },
          "rows"_a.noconvert(), "values"_a.noconvert(), "slots"_a.noconvert())
      .def(
          "encode",
          [](const Table& self, const Matrix& values, const std::vector<ConstSlotArray>& slots) {
            const std::size_t n = values.shape(0);
            const std::size_t row_bytes = self.row_bytes();
            require_shape("values", n, self.dim(), values);
            require_slots(self, n, slots);
            monolith::EntryViews views{values.data(), {}};
            for (const ConstSlotArray& slot : slots) views.slots.push_back(slot.data());
            Buffer<std::uint8_t> rows(n * row_bytes);
            {
              const Unlocked unlocked;
              self.encode(n, views, std::as_writable_bytes(rows.span()));
            }
            return std::move(rows).matrix(n, row_bytes);
          },
          "values"_a.noconvert(), "slots"_a.noconvert());
}

using ChangeArrays =
    std::tuple<OutVector<std::int64_t>, OutVector<std::uint32_t>, OutMatrix<std::uint8_t>, OutVector<std::int64_t>>;

ChangeArrays arrays_of(std::unique_ptr<ChangeBatch> piece, std::size_t row_bytes) {
  ChangeBatch& batch = *piece;
  const nb::capsule owner = keep(std::move(piece));
  const OutVector<std::int64_t> erased(batch.erased.data(), {batch.erased.size()}, owner);
  return std::tuple_cat(arrays_of(batch.rows, row_bytes, owner), std::tuple(erased));
}

void def_changes(nb::class_<Table>& table) {
  table.def("track_changes", &Table::track_changes, nb::call_guard<Unlocked>())
      .def_prop_ro("changed", &Table::changed, nb::call_guard<Unlocked>())
      .def("cut_changes", &Table::cut_changes, nb::call_guard<Unlocked>(), "Returns the number of the cut.")
      .def(
          "read_changes",
          [](Table& self, std::uint64_t cut) -> std::optional<ChangeArrays> {
            auto piece = std::make_unique<ChangeBatch>();
            {
              const Unlocked unlocked;
              if (!self.read_changes(cut, *piece)) return std::nullopt;
            }
            return arrays_of(std::move(piece), self.row_bytes());
          },
          "cut"_a, "The next ids, times, rows and removed ids; None when there are none left.")
      .def("commit_changes", &Table::commit_changes, "cut"_a, nb::call_guard<Unlocked>())
      .def("rollback_changes", &Table::rollback_changes, "cut"_a, nb::call_guard<Unlocked>());
}

using FeedArrays =
    std::tuple<OutVector<std::int64_t>, OutVector<std::uint32_t>, OutMatrix<float>, OutVector<std::int64_t>>;

void def_feed(nb::class_<Table>& table) {
  table.def("track_feed", &Table::track_feed, nb::call_guard<Unlocked>())
      .def_prop_ro("fed", &Table::fed, nb::call_guard<Unlocked>())
      .def(
          "read_feed",
          [](Table& self) -> std::optional<FeedArrays> {
            auto piece = std::make_unique<monolith::FeedBatch>();
            {
              const Unlocked unlocked;
              if (!self.read_feed(*piece)) return std::nullopt;
            }
            monolith::FeedBatch& batch = *piece;
            const nb::capsule owner = keep(std::move(piece));
            return FeedArrays(OutVector<std::int64_t>(batch.ids.data(), {batch.ids.size()}, owner),
                              OutVector<std::uint32_t>(batch.times.data(), {batch.times.size()}, owner),
                              OutMatrix<float>(batch.values.data(), {batch.ids.size(), self.dim()}, owner),
                              OutVector<std::int64_t>(batch.erased.data(), {batch.erased.size()}, owner));
          },
          "The next ids, times, stored weights and removed ids; None when a pass over the table has ended.");
}

void def_updates(nb::class_<Table>& table) {
  table
      .def(
          "apply_gradients",
          [](Table& self, const Ids& ids, const Matrix& grads, const InVector<float>& learning_rates, std::int64_t step,
             std::uint32_t event_time, bool sequential, const std::optional<Matrix>& snapshot) {
            require_shape("grads", ids.size(), self.dim(), grads);
            UpdateOptions options = update_options(learning_rates, step, event_time);
            options.sequential = sequential;
            if (snapshot) {
              require_shape("snapshot", ids.size(), self.dim(), *snapshot);
              options.snapshot = snapshot->data();
            }
            const Unlocked unlocked;
            self.apply_gradients(as_span(ids), grads.data(), options);
          },
          "ids"_a.noconvert(), "grads"_a.noconvert(), "learning_rates"_a.noconvert(), "step"_a, "event_time"_a,
          "sequential"_a, "snapshot"_a.noconvert().none())
      .def(
          "apply_pooled_gradients",
          [](Table& self, const Ids& ids, const Ids& row_splits, Pooling pooling, const Matrix& grads,
             const InVector<float>& learning_rates, std::int64_t step, std::uint32_t event_time) {
            require_shape("grads", row_splits.size() == 0 ? 0 : row_splits.size() - 1, self.dim(), grads);
            const UpdateOptions options = update_options(learning_rates, step, event_time);
            const Unlocked unlocked;
            self.apply_pooled_gradients(as_span(ids), as_span(row_splits), pooling, grads.data(), options);
          },
          "ids"_a.noconvert(), "row_splits"_a.noconvert(), "pooling"_a, "grads"_a.noconvert(),
          "learning_rates"_a.noconvert(), "step"_a, "event_time"_a)
      .def(
          "assign",
          [](Table& self, const Ids& ids, const Matrix& values, std::uint32_t event_time) {
            require_shape("values", ids.size(), self.dim(), values);
            const Unlocked unlocked;
            self.assign(as_span(ids), values.data(), event_time);
          },
          "ids"_a.noconvert(), "values"_a.noconvert(), "event_time"_a)
      .def(
          "assign_add",
          [](Table& self, const Ids& ids, const Matrix& values, std::uint32_t event_time) {
            require_shape("values", ids.size(), self.dim(), values);
            const Unlocked unlocked;
            self.assign_add(as_span(ids), values.data(), event_time);
          },
          "ids"_a.noconvert(), "values"_a.noconvert(), "event_time"_a)
      .def(
          "reinitialize",
          [](Table& self, const Ids& ids, std::uint32_t event_time, const Target<std::int32_t>& existed) {
            require_shape("existed", ids.size(), 1, existed.size(), 1);
            const Unlocked unlocked;
            self.reinitialize(as_span(ids), event_time, existed.data());
          },
          "ids"_a.noconvert(), "event_time"_a, "existed"_a.noconvert())
      .def(
          "erase",
          [](Table& self, const Ids& ids, const Target<bool>& erased) {
            require_shape("erased", ids.size(), 1, erased.size(), 1);
            const Unlocked unlocked;
            self.erase(as_span(ids), erased.data());
          },
          "ids"_a.noconvert(), "erased"_a.noconvert())
      .def(
          "insert_rows",
          [](Table& self, const Ids& ids, const InVector<std::uint32_t>& times, const Rows& rows) {
            require_shape("times", ids.size(), 1, times.size(), 1);
            require_shape("rows", ids.size(), self.row_bytes(), rows);
            const Unlocked unlocked;
            self.insert_raw(as_span(ids), as_span(times), bytes_of(rows));
          },
          "ids"_a.noconvert(), "times"_a.noconvert(), "rows"_a.noconvert())
      .def("evict", &Table::evict, "now"_a, nb::call_guard<Unlocked>())
      .def("clear", &Table::clear, nb::call_guard<Unlocked>());
}

void init_file(nb::module_& m) {
  m.def(
      "save_table",
      [](const Table& table, const std::string& path, const std::string& metadata, bool skip_expired, std::uint32_t first,
         std::uint32_t last) {
        const auto result = monolith::save_table(table, path, metadata, skip_expired, {first, last});
        return std::pair(result.rows, result.bytes);
      },
      "table"_a, "path"_a, "metadata"_a, "skip_expired"_a, "first_bucket"_a, "last_bucket"_a,
      nb::call_guard<Unlocked>(),
      "Returns rows and bytes written.");
  nb::class_<monolith::TableFileWriter>(m, "TableFileWriter", "Writes one table file from several tables of one layout.")
      .def(
          "__init__",
          [](monolith::TableFileWriter* self, const std::string& path, const Table& table, const std::string& metadata) {
            const Unlocked unlocked;
            new (self) monolith::TableFileWriter(path, table.layout(), table.row_bytes(), metadata);
          },
          "path"_a, "table"_a, "metadata"_a)
      .def(
          "append", [](monolith::TableFileWriter& self, const Table& table) { self.append(table); }, "table"_a,
          nb::call_guard<Unlocked>())
      .def(
          "finish", [](monolith::TableFileWriter& self, const Table& table) { return self.finish(table).bytes; }, "table"_a,
          nb::call_guard<Unlocked>(), "Makes the file appear, durable, with the state of `table`. Returns its size in bytes.");
  nb::class_<monolith::TableFile>(m, "TableFile", "A table file whose header, footer and block lengths have been checked.")
      .def(nb::init<const std::string&>(), "path"_a, nb::call_guard<Unlocked>())
      .def_prop_ro("metadata", [](const monolith::TableFile& self) {
        return nb::bytes(self.metadata().data(), self.metadata().size());
      })
      .def_prop_ro("layout", &monolith::TableFile::layout)
      .def_prop_ro("rows", &monolith::TableFile::rows)
      .def_prop_ro("checksum", &monolith::TableFile::checksum, "CRC-32C of the file, if its blocks have the checksums they should have.")
      .def_prop_ro("state", [](const monolith::TableFile& self) { return as_tuple(self.state()); })
      .def(
          "read_into",
          [](monolith::TableFile& self, Table& table, std::uint32_t first, std::uint32_t last) {
            return self.read_into(table, {first, last});
          },
          "table"_a, "first_bucket"_a, "last_bucket"_a, nb::call_guard<Unlocked>(),
          "Upserts the rows of these buckets; returns how many.")
      .def("load_into", &monolith::TableFile::load_into, "table"_a, nb::call_guard<Unlocked>());
}

}  // namespace

void init_table(nb::module_& m) {
  init_config(m);
  nb::enum_<Pooling>(m, "Pooling")
      .value("SUM", Pooling::kSum)
      .value("MEAN", Pooling::kMean)
      .value("SQRTN", Pooling::kSqrtN);
  nb::class_<monolith::TableStats>(m, "TableStats")
      .def_ro("rows", &monolith::TableStats::rows)
      .def_ro("bytes", &monolith::TableStats::bytes)
      .def_ro("row_bytes", &monolith::TableStats::row_bytes)
      .def_ro("index_slots", &monolith::TableStats::index_slots)
      .def_ro("growths", &monolith::TableStats::growths)
      .def_ro("max_event_time", &monolith::TableStats::max_event_time);
  nb::class_<monolith::SlotInfo>(m, "SlotInfo")
      .def_ro("name", &monolith::SlotInfo::name)
      .def_ro("width", &monolith::SlotInfo::width)
      .def_ro("is_int64", &monolith::SlotInfo::is_int64);
  nb::class_<RowBatch>(m, "RowBatch")
      .def(nb::init<>())
      .def("__len__", [](const RowBatch& self) { return self.ids.size(); })
      .def(
          "take",
          [](RowBatch& self, std::size_t row_bytes) {
            auto taken = std::make_unique<RowBatch>(std::exchange(self, {}));
            RowBatch& batch = *taken;
            return arrays_of(batch, row_bytes, keep(std::move(taken)));
          },
          "row_bytes"_a, "Ids, times and rows; the batch is empty afterwards.")
      .def("clear", &RowBatch::clear);
  nb::class_<monolith::Cursor>(m, "Cursor").def(nb::init<>());

  nb::class_<Table> table(m, "Table", "The collisionless embedding table.");
  table
      .def(nb::init<monolith::TableConfig, std::shared_ptr<monolith::AdmissionFilter>>(), "config"_a,
           "admission"_a.none() = nb::none(), nb::call_guard<Unlocked>())
      .def_prop_ro("dim", &Table::dim)
      .def_prop_ro("layout", &Table::layout)
      .def_prop_ro("row_bytes", &Table::row_bytes)
      .def_prop_ro("max_event_time", &Table::max_event_time)
      .def_prop_ro("state", [](const Table& self) { return as_tuple(self.state()); })
      .def("reconfigure", &Table::reconfigure, "config"_a, "admission"_a.none(), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "set_state",
          [](Table& self, std::uint32_t max_event_time, std::uint32_t updates, std::vector<float> hashnet_scales) {
            self.set_state({max_event_time, updates, std::move(hashnet_scales)});
          },
          "max_event_time"_a, "updates"_a, "hashnet_scales"_a)
      .def("slot_infos", &Table::slot_infos)
      .def("stats", &Table::stats, nb::call_guard<Unlocked>())
      .def("__len__", [](const Table& self) { return self.size(); });
  def_reads(table);
  def_updates(table);
  def_changes(table);
  def_feed(table);
  init_file(m);
}
