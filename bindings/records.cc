#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "module.h"
#include "monolith/error.h"
#include "monolith/framing.h"
#include "monolith/record_parser.h"
#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::ColumnData;
using monolith::ColumnLayout;
using monolith::ColumnSpec;
using monolith::ColumnType;
using monolith::Damage;
using monolith::Frame;
using monolith::Frames;
using monolith::FramingOptions;
using monolith::MessageOptions;
using monolith::RecordFormat;
using monolith::RecordHeader;
using monolith::RecordParser;

namespace {

std::span<const std::uint8_t> bytes_of(const nb::bytes& data) {
  return {static_cast<const std::uint8_t*>(data.data()), data.size()};
}

// Frames are positions inside the bytes they were found in; the two stay together.
struct Chunk {
  nb::bytes data;
  Frames found;

  std::size_t next_start(std::size_t frame) const {
    return frame < found.frames.size() ? found.frames[frame].start : found.consumed;
  }
};

Chunk split(nb::bytes data, std::size_t start, const FramingOptions& options, bool last) {
  Frames found;
  {
    const auto bytes = bytes_of(data);
    if (start > bytes.size()) throw monolith::InvalidArgument("start is behind the end of data");
    const Unlocked unlocked;
    found = monolith::split_frames(bytes, start, options, last);
  }
  return {std::move(data), std::move(found)};
}

// The records of a queue, kept alive while they are parsed.
struct Messages {
  Messages(const nb::object& messages, std::size_t max_bytes, std::optional<RecordHeader> header)
      : values(nb::tuple(messages)), options{max_bytes, header} {
    spans.reserve(values.size());
    for (const nb::handle value : values) {
      if (!PyBytes_Check(value.ptr())) throw nb::type_error("messages: expected bytes");
      spans.push_back(bytes_of(nb::borrow<nb::bytes>(value)));
    }
  }

  nb::tuple values;  // a list could be changed, and release what `spans` point to
  MessageOptions options;
  std::vector<std::span<const std::uint8_t>> spans;
};

template <typename T>
OutVector<T> moved(std::vector<T>& vector) {
  return adopt(std::make_unique<std::vector<T>>(std::move(vector)));
}

nb::object values_of(ColumnData& column, ColumnType type) {
  switch (type) {
    case ColumnType::kInt64: return nb::cast(moved(column.int64));
    case ColumnType::kFloat32: return nb::cast(moved(column.float32));
    case ColumnType::kFloat64: return nb::cast(moved(column.float64));
    case ColumnType::kBytes: return nb::cast(moved(column.bytes));
  }
  return nb::none();
}

struct Parser {
  Parser(RecordFormat format, bool by_header, const std::vector<ColumnSpec>& columns) : parser(format, by_header, columns) {
    for (const ColumnSpec& column : columns) types.push_back(column.type);
  }

  nb::tuple add(const Chunk& chunk, std::size_t frame, std::size_t row, std::size_t max_rows, std::size_t stride) {
    if (stride == 0) throw monolith::InvalidArgument("stride is 0");
    RecordParser::Progress progress;
    {
      const auto bytes = bytes_of(chunk.data);
      const Unlocked unlocked;
      progress = parser.add(bytes, chunk.found.frames, frame, row, max_rows, stride);
    }
    return nb::make_tuple(progress.frame, progress.row, progress.problem, progress.message);
  }

  nb::tuple add_messages(const Messages& messages, std::size_t message, std::size_t row, std::size_t max_rows) {
    RecordParser::Progress progress;
    {
      const Unlocked unlocked;
      progress = parser.add(messages.spans, message, row, max_rows, messages.options);
    }
    return nb::make_tuple(progress.frame, progress.row, progress.problem, progress.message);
  }

  nb::list take() {
    std::vector<ColumnData> columns = parser.take();
    nb::list taken;
    for (std::size_t i = 0; i < columns.size(); ++i) {
      ColumnData& column = columns[i];
      taken.append(nb::make_tuple(values_of(column, types[i]), moved(column.splits), moved(column.lengths),
                                  moved(column.list_splits)));
    }
    return taken;
  }

  RecordParser parser;
  std::vector<ColumnType> types;
};

}  // namespace

void init_records(nb::module_& m) {
  nb::enum_<RecordFormat>(m, "RecordFormat")
      .value("TF_EXAMPLE", RecordFormat::kTfExample)
      .value("EXAMPLE", RecordFormat::kExample)
      .value("EXAMPLE_BATCH", RecordFormat::kExampleBatch)
      .value("INSTANCE", RecordFormat::kInstance)
      .value("JSON", RecordFormat::kJson);
  nb::enum_<monolith::Problem>(m, "Problem")
      .value("NONE", monolith::Problem::kNone)
      .value("CORRUPT", monolith::Problem::kCorrupt)
      .value("SCHEMA", monolith::Problem::kSchema);
  nb::enum_<ColumnType>(m, "ColumnType")
      .value("INT64", ColumnType::kInt64)
      .value("FLOAT32", ColumnType::kFloat32)
      .value("FLOAT64", ColumnType::kFloat64)
      .value("BYTES", ColumnType::kBytes);
  nb::enum_<ColumnLayout>(m, "ColumnLayout")
      .value("FIXED", ColumnLayout::kFixed)
      .value("RAGGED", ColumnLayout::kRagged)
      .value("NESTED", ColumnLayout::kNested);
  nb::class_<ColumnSpec>(m, "ColumnSpec")
      .def(
          "__init__",
          [](ColumnSpec* self, std::string name, std::string field, ColumnType type, ColumnLayout layout, std::size_t width,
             std::optional<double> fill, bool finite) {
            new (self) ColumnSpec{std::move(name), std::move(field), type, layout, width, fill, finite};
          },
          "name"_a, "field"_a, "type"_a, "layout"_a, "width"_a, "fill"_a.none(), "finite"_a = false);
  nb::class_<RecordHeader>(m, "RecordHeader")
      .def(
          "__init__",
          [](RecordHeader* self, bool lagrangex, bool kafka_dump_prefix, bool sort_id, bool kafka_dump) {
            new (self) RecordHeader{lagrangex, kafka_dump_prefix, sort_id, kafka_dump};
          },
          nb::kw_only(), "lagrangex"_a, "kafka_dump_prefix"_a, "sort_id"_a, "kafka_dump"_a);
  nb::class_<Messages>(m, "Messages")
      .def(nb::init<const nb::object&, std::size_t, std::optional<RecordHeader>>(), "messages"_a, nb::kw_only(), "max_bytes"_a,
           "header"_a.none())
      .def("__len__", [](const Messages& messages) { return messages.spans.size(); });
  nb::class_<FramingOptions>(m, "FramingOptions")
      .def(
          "__init__",
          [](FramingOptions* self, bool tfrecord, bool lagrangex, bool kafka_dump_prefix, bool sort_id, bool kafka_dump,
             std::size_t max_record_bytes) {
            new (self) FramingOptions{tfrecord, {lagrangex, kafka_dump_prefix, sort_id, kafka_dump}, max_record_bytes};
          },
          nb::kw_only(), "tfrecord"_a, "lagrangex"_a, "kafka_dump_prefix"_a, "sort_id"_a, "kafka_dump"_a,
          "max_record_bytes"_a);
  nb::class_<Chunk>(m, "Chunk")
      .def("__len__", [](const Chunk& chunk) { return chunk.found.frames.size(); })
      .def("next_start", &Chunk::next_start, "frame"_a, "Where frame number `frame`, or what follows the last one, begins.")
      .def_prop_ro("consumed", [](const Chunk& chunk) { return chunk.found.consumed; })
      .def_prop_ro("needed", [](const Chunk& chunk) { return chunk.found.needed; })
      .def_prop_ro("lost", [](const Chunk& chunk) { return chunk.found.lost; });
  m.def("split_frames", &split, "data"_a, "start"_a, "options"_a, "last"_a);
  m.def("masked_crc32c", [](const nb::bytes& data) { return monolith::masked_crc32c(data.data(), data.size()); }, "data"_a);
  nb::class_<Parser>(m, "RecordParser")
      .def(nb::init<RecordFormat, bool, const std::vector<ColumnSpec>&>(), "format"_a, "by_header"_a, "columns"_a)
      .def("add", &Parser::add, "chunk"_a, "frame"_a, "row"_a, "max_rows"_a, "stride"_a,
           "(frame, row) to go on with, problem, message")
      .def("add_messages", &Parser::add_messages, "messages"_a, "message"_a, "row"_a, "max_rows"_a,
           "(message, row) to go on with, problem, its text")
      .def("rows", [](const Parser& parser) { return parser.parser.rows(); })
      .def("take", &Parser::take, "For each column: values, row splits, lengths of inner lists, their row splits");
}
