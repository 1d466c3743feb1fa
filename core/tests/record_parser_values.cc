// What a well-formed record becomes: the values of each column, in their order, and nothing of the neighbour. Damage is tested
// elsewhere.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "hand_written_message.h"
#include "monolith/error.h"
#include "monolith/record_parser.h"

namespace {

using monolith::ColumnData;
using monolith::ColumnLayout;
using monolith::ColumnSpec;
using monolith::ColumnType;
using monolith::Damage;
using monolith::Frame;
using monolith::Problem;
using monolith::RecordFormat;
using monolith::RecordParser;
using Numbers = std::vector<std::int64_t>;

ColumnSpec ints(const std::string& name) { return {name, name, ColumnType::kInt64, ColumnLayout::kRagged, 1, {}}; }
ColumnSpec floats(const std::string& name, std::size_t width, std::optional<double> fill = {}) {
  return {name, name, ColumnType::kFloat32, ColumnLayout::kFixed, width, fill};
}

// tensorflow.Feature: one of bytes_list = 1, float_list = 2, int64_list = 3, each with its values in field 1.
Bytes packed_ints(const Numbers& values) {
  Message packed;
  for (const std::int64_t value : values) packed.varint(static_cast<std::uint64_t>(value));
  return Message().data(3, Message().data(1, packed.bytes).bytes).bytes;
}
Bytes packed_floats(const std::vector<float>& values) {
  Bytes raw(values.size() * 4);
  std::memcpy(raw.data(), values.data(), raw.size());
  return Message().data(2, Message().data(1, raw).bytes).bytes;
}
Bytes strings(const std::vector<std::string>& values) {
  Message list;
  for (const std::string& value : values) list.text(1, value);
  return Message().data(1, list.bytes).bytes;
}

Bytes example(const std::vector<std::pair<std::string, Bytes>>& features) {
  Message all;
  for (const auto& [name, feature] : features) all.data(1, named(name, feature));
  return Message().data(1, all.bytes).bytes;
}

// Adds records one behind the other, as from one file.
RecordParser::Progress add(RecordParser& parser, const std::vector<Bytes>& records, std::size_t max_rows = 1000, std::size_t stride = 1,
                           std::size_t first = 0) {
  Bytes data;
  std::vector<Frame> frames;
  for (const Bytes& record : records) {
    frames.push_back({data.size(), data.size(), data.size() + record.size(), 0, false, Damage::kNone});
    data.insert(data.end(), record.begin(), record.end());
  }
  return parser.add(data, frames, first, 0, max_rows, stride);
}

}  // namespace

TEST("features become ragged, fixed and text columns") {
  RecordParser parser(RecordFormat::kTfExample, false,
                      {ints("ids"), floats("pair", 2), {"name", "name", ColumnType::kBytes, ColumnLayout::kFixed, 1, {}}});
  const auto progress = add(parser, {example({{"ids", packed_ints({5, -1, INT64_MIN})}, {"pair", packed_floats({1.5f, -2})}, {"name", strings({"ab"})}}),
                                     example({{"name", strings({""})}, {"pair", packed_floats({0, 7})}, {"ids", packed_ints({})}, {"other", packed_ints({9})}})});
  CHECK(progress.problem == Problem::kNone);
  CHECK_EQ(parser.rows(), 2u);
  const std::vector<ColumnData> columns = parser.take();
  CHECK(columns[0].int64 == (Numbers{5, -1, INT64_MIN}));
  CHECK(columns[0].splits == (Numbers{0, 3, 3}));
  CHECK(columns[1].float32 == (std::vector<float>{1.5f, -2, 0, 7}));
  CHECK(columns[2].bytes == (std::vector<std::uint8_t>{'a', 'b'}));
  CHECK(columns[2].splits == (Numbers{0, 2, 2}));
  CHECK_EQ(parser.rows(), 0u);  // and begins anew
}

TEST("a missing feature is an empty row, or the fill value of a fixed column") {
  RecordParser parser(RecordFormat::kTfExample, false, {ints("ids"), floats("x", 2, 0.5)});
  CHECK(add(parser, {example({}), example({{"x", packed_floats({1, 2})}, {"ids", packed_ints({3})}})}).problem == Problem::kNone);
  const auto columns = parser.take();
  CHECK(columns[0].splits == (Numbers{0, 0, 1}));
  CHECK(columns[1].float32 == (std::vector<float>{0.5f, 0.5f, 1, 2}));
}

TEST("without a fill value a record that lacks a fixed column does not fit") {
  RecordParser parser(RecordFormat::kTfExample, false, {floats("x", 1)});
  const auto progress = add(parser, {example({{"x", packed_floats({1})}}), example({}), example({{"x", packed_floats({3})}})});
  CHECK(progress.problem == Problem::kSchema);
  CHECK_EQ(progress.frame, 2u);  // behind the one that does not fit
  CHECK(progress.message.find("x") != std::string::npos);
  CHECK_EQ(parser.rows(), 1u);
}

TEST("values of another type, and too many of them, do not fit and leave no trace") {
  for (const Bytes& wrong : {packed_ints({1, 2}), strings({"a"}), packed_floats({1, 2, 3})}) {
    RecordParser parser(RecordFormat::kTfExample, false, {ints("ids"), floats("x", 2)});
    const auto progress = add(parser, {example({{"ids", packed_ints({1})}, {"x", wrong}})});
    CHECK(progress.problem == Problem::kSchema);
    const auto columns = parser.take();
    CHECK(columns[0].int64.empty());
    CHECK(columns[1].float32.empty());
  }
}

TEST("a feature that comes twice counts with its last occurrence") {
  RecordParser parser(RecordFormat::kTfExample, false, {ints("ids")});
  CHECK(add(parser, {example({{"ids", packed_ints({1, 2})}, {"ids", packed_ints({3})}})}).problem == Problem::kNone);
  CHECK(parser.take()[0].int64 == Numbers{3});
}

TEST("numbers may come packed or one by one") {
  Message list;
  for (const std::uint64_t value : {7u, 8u}) list.number(1, value);
  list.data(1, Message().varint(9).varint(10).bytes);
  const Bytes mixed = Message().data(3, list.bytes).bytes;
  RecordParser parser(RecordFormat::kTfExample, false, {ints("ids")});
  CHECK(add(parser, {example({{"ids", mixed}})}).problem == Problem::kNone);
  CHECK(parser.take()[0].int64 == (Numbers{7, 8, 9, 10}));
}

TEST("several strings in a row are a nested column") {
  RecordParser parser(RecordFormat::kTfExample, false, {{"tags", "tags", ColumnType::kBytes, ColumnLayout::kNested, 1, {}}});
  CHECK(add(parser, {example({{"tags", strings({"ab", "", "c"})}}), example({}), example({{"tags", strings({"d"})}})}).problem == Problem::kNone);
  const auto columns = parser.take();
  CHECK(columns[0].bytes == (std::vector<std::uint8_t>{'a', 'b', 'c', 'd'}));
  CHECK(columns[0].lengths == (Numbers{2, 0, 1, 1}));
  CHECK(columns[0].list_splits == (Numbers{0, 3, 3, 4}));
}

TEST("reading stops at the number of rows asked for and goes on there") {
  std::vector<Bytes> records;
  for (std::int64_t i = 0; i < 7; ++i) records.push_back(example({{"ids", packed_ints({i})}}));
  RecordParser parser(RecordFormat::kTfExample, false, {ints("ids")});
  auto progress = add(parser, records, 3);
  CHECK_EQ(progress.frame, 3u);
  CHECK(parser.take()[0].int64 == (Numbers{0, 1, 2}));
  progress = add(parser, records, 100, 1, progress.frame);
  CHECK_EQ(progress.frame, 7u);
  CHECK(parser.take()[0].int64 == (Numbers{3, 4, 5, 6}));
}

TEST("readers that share a file read every frame once") {
  std::vector<Bytes> records;
  for (std::int64_t i = 0; i < 10; ++i) records.push_back(example({{"ids", packed_ints({i})}}));
  std::vector<int> seen(10);
  for (std::size_t reader = 0; reader < 3; ++reader) {
    RecordParser parser(RecordFormat::kTfExample, false, {ints("ids")});
    add(parser, records, 100, 3, reader);
    const auto columns = parser.take();
    for (const std::int64_t i : columns[0].int64) ++seen[static_cast<std::size_t>(i)];
  }
  CHECK(seen == std::vector<int>(10, 1));
}

TEST("columns that no record can have are refused") {
  const auto make = [](ColumnSpec spec, RecordFormat format) { RecordParser parser(format, false, {std::move(spec)}); };
  CHECK_THROWS(make(ints("line_id.no_such_field"), RecordFormat::kExample), monolith::InvalidArgument);
  CHECK_THROWS(make({"b", "b", ColumnType::kBytes, ColumnLayout::kRagged, 1, {}}, RecordFormat::kTfExample), monolith::InvalidArgument);
  make(ints("line_id.no_such_field"), RecordFormat::kTfExample);  // a feature's name like any other
}

TEST("the original's Example has a label and a weight besides its features") {
  // Example: named features 1, label 101 (float, packed), instance weight 102.
  const auto record = [](float weight) {
    Bytes label(8), one(4);
    const float labels[] = {1, 0};
    std::memcpy(label.data(), labels, 8);
    std::memcpy(one.data(), &weight, 4);
    Message message;
    message.data(101, label);
    message.varint(102 << 3 | 5);
    message.bytes.insert(message.bytes.end(), one.begin(), one.end());
    return message.bytes;
  };
  RecordParser parser(RecordFormat::kExample, false, {floats("label", 3, 0.25), floats("instance_weight", 1)});
  const auto progress = add(parser, {record(2.5f), record(-1)});
  CHECK(progress.problem == Problem::kNone);
  const auto columns = parser.take();
  // A label that is too short is filled up; a weight that is not above 0 becomes 1.
  CHECK(columns[0].float32 == (std::vector<float>{1, 0, 0.25f, 1, 0, 0.25f}));
  CHECK(columns[1].float32 == (std::vector<float>{2.5f, 1}));
}
