// Records come from other machines. Whatever is in them, the parser reads no byte outside, leaves no half row, does not allocate
// without bound, and works on with the next record.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "hand_written_message.h"
#include "monolith/error.h"
#include "monolith/record_parser.h"

using monolith::ColumnData;
using monolith::ColumnLayout;
using monolith::ColumnSpec;
using monolith::ColumnType;
using monolith::Damage;
using monolith::Frame;
using monolith::Problem;
using monolith::RecordFormat;
using monolith::RecordParser;

namespace {

Bytes int64_list(const Bytes& packed, std::uint32_t field) { return Message().data(field, Message().data(1, packed).bytes).bytes; }

std::vector<ColumnSpec> columns() {
  return {{"ids", "ids", ColumnType::kInt64, ColumnLayout::kRagged, 1, {}},
          {"pair", "pair", ColumnType::kFloat32, ColumnLayout::kFixed, 2, 0.5},
          {"name", "name", ColumnType::kBytes, ColumnLayout::kFixed, 1, {}},
          {"tags", "tags", ColumnType::kBytes, ColumnLayout::kNested, 1, {}},
          {"slot_3", "slot_3", ColumnType::kInt64, ColumnLayout::kRagged, 1, {}}};
}

std::vector<Frame> one_frame(const Bytes& record) { return {{0, 0, record.size(), 0, false, Damage::kNone}}; }

// Adds `record` alone and says what came of it. A copy of exactly its size lets the address sanitizer see a read outside.
RecordParser::Progress add(RecordParser& parser, const Bytes& record, std::size_t max_rows = 1 << 22) {
  const Bytes exact(record);
  return parser.add(exact, one_frame(exact), 0, 0, max_rows);
}

Bytes sample(RecordFormat format) {
  const Bytes ids{1, 2, 0x80, 1};
  const Bytes floats{0, 0, 0x80, 0x3f, 0, 0, 0, 0x40};
  if (format == RecordFormat::kTfExample) {
    const Bytes features = Message()
                               .data(1, named("ids", int64_list(ids, 3)))
                               .data(1, named("pair", int64_list(floats, 2)))
                               .data(1, named("name", int64_list({'x', 'y'}, 1)))
                               .data(1, named("tags", int64_list({'z'}, 1)))
                               .bytes;
    return Message().data(1, features).bytes;
  }
  const auto feature = [&](std::uint32_t field, const Bytes& values) { return int64_list(values, field); };
  if (format == RecordFormat::kExample) {
    return Message()
        .data(1, named("ids", feature(5, ids)))
        .data(1, named("pair", feature(3, floats)))
        .data(1, named("name", feature(6, {'x'})))
        .data(1, named("tags", feature(6, {'z'})))
        .bytes;
  }
  if (format == RecordFormat::kInstance) {
    return Message()
        .data(1, {1, 0, 0, 0, 0, 0, 0xc0, 0})
        .data(9, Message().text(1, "ids").data(4, ids).bytes)
        .data(9, Message().text(1, "pair").data(3, floats).bytes)
        .data(9, Message().text(1, "tags").text(5, "z").text(5, "").bytes)
        .bytes;
  }
  const auto column = [](const std::string& name, const Bytes& one, bool shared) {
    Message list;
    list.text(1, name).data(2, one);
    return shared ? list.number(3, 1).bytes : list.data(2, one).bytes;
  };
  return Message()
      .data(1, column("ids", feature(5, ids), false))
      .data(1, column("pair", feature(3, floats), true))
      .data(1, column("tags", feature(6, {'z'}), false))
      .number(3, 2)
      .bytes;
}

const RecordFormat kFormats[] = {RecordFormat::kTfExample, RecordFormat::kExample, RecordFormat::kExampleBatch,
                                 RecordFormat::kInstance};

void check_whole(RecordParser& parser) {
  const std::size_t rows = parser.rows();
  const std::vector<ColumnData> taken = parser.take();
  for (const std::size_t column : {0u, 2u, 3u, 4u}) {
    const auto& values = taken[column];
    REQUIRE(values.splits.size() == rows + 1);
    REQUIRE(values.splits.back() == static_cast<std::int64_t>(values.int64.size() + values.bytes.size()));
    for (std::size_t row = 0; row < rows; ++row) REQUIRE(values.splits[row] <= values.splits[row + 1]);
  }
  REQUIRE(taken[1].float32.size() == 2 * rows);
  REQUIRE(taken[3].list_splits.size() == rows + 1);
  REQUIRE(taken[3].list_splits.back() == static_cast<std::int64_t>(taken[3].lengths.size()));
  std::int64_t bytes = 0;
  for (const std::int64_t length : taken[3].lengths) bytes += length;
  REQUIRE(bytes == static_cast<std::int64_t>(taken[3].bytes.size()));
}

}  // namespace

TEST("the samples are read as they are meant") {
  for (const RecordFormat format : kFormats) {
    RecordParser parser(format, false, columns());
    const auto progress = add(parser, sample(format));
    CHECK_EQ(progress.message, "");
    CHECK_EQ(progress.frame, 1u);
    CHECK_EQ(parser.rows(), format == RecordFormat::kExampleBatch ? 2u : 1u);
    const auto taken = parser.take();
    CHECK(std::vector(taken[0].int64.begin(), taken[0].int64.begin() + 3) == (std::vector<std::int64_t>{1, 2, 128}));
    CHECK_EQ(taken[1].float32[1], 2.0f);
    CHECK_EQ(taken[3].bytes[0], 'z');
    if (format == RecordFormat::kInstance) CHECK(taken[4].int64 == (std::vector<std::int64_t>{3LL << 48 | 1}));
    CHECK_EQ(parser.rows(), 0u);
  }
}

TEST("a record cut anywhere is a problem or a shorter record, never a crash") {
  for (const RecordFormat format : kFormats) {
    const Bytes record = sample(format);
    for (std::size_t cut = 0; cut < record.size(); ++cut) {
      RecordParser parser(format, false, columns());
      add(parser, Bytes(record.begin(), record.begin() + static_cast<std::ptrdiff_t>(cut)));
      check_whole(parser);
    }
  }
}

TEST("damaged bytes leave whole rows behind, and the next record is read") {
  std::mt19937_64 random(11);
  for (const RecordFormat format : kFormats) {
    const Bytes record = sample(format);
    RecordParser parser(format, false, columns());
    std::size_t problems = 0;
    for (int round = 0; round < 20000; ++round) {
      Bytes damaged = record;
      const auto changes = 1 + random() % 3;
      for (std::uint64_t i = 0; i < changes; ++i) damaged[random() % damaged.size()] = static_cast<std::uint8_t>(random());
      if (random() % 4 == 0) damaged.resize(random() % (damaged.size() + 1));
      problems += add(parser, damaged).problem != Problem::kNone ? 1u : 0u;
      const std::size_t before = parser.rows();
      REQUIRE(add(parser, record).problem == Problem::kNone);
      REQUIRE(parser.rows() == before + (format == RecordFormat::kExampleBatch ? 2 : 1));
      if (round % 64 == 0) check_whole(parser);
    }
    CHECK(problems > 1000);
  }
}

TEST("bytes of no meaning at all") {
  std::mt19937_64 random(12);
  for (int round = 0; round < 40000; ++round) {
    RecordParser parser(kFormats[round % 4], false, columns());
    Bytes noise(random() % 80);
    for (auto& byte : noise) byte = static_cast<std::uint8_t>(random() % 2 == 0 ? random() : random() % 32);
    add(parser, noise);
    check_whole(parser);
  }
}

TEST("a batch cannot claim more rows, or share a longer feature, than its limits") {
  const auto batch = [](std::uint64_t rows) { return Message().number(3, rows).bytes; };
  RecordParser parser(RecordFormat::kExampleBatch, false, columns());
  CHECK(add(parser, batch(RecordParser::kMaxRows + 1)).problem == Problem::kCorrupt);
  CHECK(add(parser, batch(UINT64_MAX)).problem == Problem::kCorrupt);
  CHECK(add(parser, batch(1000)).problem == Problem::kNone);
  CHECK_EQ(parser.rows(), 1000u);
  const Bytes shared = Message()
                           .data(1, Message().text(1, "ids").data(2, int64_list(Bytes(1000, 1), 5)).number(3, 1).bytes)
                           .number(3, RecordParser::kMaxRows)
                           .bytes;
  CHECK(add(parser, shared).problem == Problem::kSchema);
  CHECK_EQ(parser.rows(), 1000u);
}

TEST("a wide column cannot be multiplied by a claimed number of rows") {
  RecordParser parser(RecordFormat::kExampleBatch, false,
                      {{"wide", "wide", ColumnType::kInt64, ColumnLayout::kFixed, 1 << 20, 0.0}});
  CHECK(add(parser, Message().number(3, 1000).bytes).problem == Problem::kSchema);
  CHECK_EQ(parser.rows(), 0u);
}

TEST("a batch is handed out in slices; damage in its last row takes all of it") {
  Message list;
  list.text(1, "ids");
  for (std::uint8_t row = 0; row < 10; ++row) list.data(2, int64_list({row}, 5));
  const Bytes good = Message().data(1, list.bytes).number(3, 10).bytes;
  RecordParser parser(RecordFormat::kExampleBatch, false, columns());
  std::size_t row = 0;
  std::vector<std::int64_t> ids;
  for (const std::size_t end : {3u, 7u, 10u}) {
    const auto progress = parser.add(good, one_frame(good), 0, row, end - row);
    row = progress.row;
    CHECK_EQ(progress.frame, end == 10 ? 1u : 0u);
    CHECK_EQ(row, end == 10 ? 0u : end);
    const auto taken = parser.take();
    ids.insert(ids.end(), taken[0].int64.begin(), taken[0].int64.end());
  }
  CHECK(ids == (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  list.data(2, {0xff});
  const Bytes bad = Message().data(1, list.bytes).number(3, 11).bytes;
  CHECK(add(parser, bad, 3).problem == Problem::kCorrupt);
  CHECK_EQ(parser.rows(), 0u);
}

TEST("every stride-th frame") {
  const Bytes record = sample(RecordFormat::kExample);
  Bytes data;
  std::vector<Frame> frames;
  for (std::size_t i = 0; i < 7; ++i) {
    frames.push_back({data.size(), data.size(), data.size() + record.size(), 0, false, Damage::kNone});
    data.insert(data.end(), record.begin(), record.end());
  }
  RecordParser parser(RecordFormat::kExample, false, columns());
  const auto progress = parser.add(data, frames, 1, 0, 100, 3);
  CHECK_EQ(parser.rows(), 2u);
  CHECK_EQ(progress.frame, 7u);
}

TEST("memory that is refused is an exception") {
  const Bytes record = sample(RecordFormat::kTfExample);
  const auto failures = failing_new::each_allocation(
      [] { return std::make_unique<RecordParser>(RecordFormat::kTfExample, false, columns()); },
      [&](std::unique_ptr<RecordParser>& parser) { parser->add(record, one_frame(record), 0, 0, 10); },
      [](std::unique_ptr<RecordParser>&) {});
  CHECK(failures >= 4);
}
