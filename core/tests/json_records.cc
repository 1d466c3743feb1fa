// JSON comes from whoever may write to a stream. Whatever it is, the parser reads no byte outside, leaves no half row, needs no more
// memory than a few times the text, and says why a record is bad. What it accepts is compared with Python's parsers elsewhere.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "monolith/record_parser.h"

namespace {

using namespace monolith;
using Numbers = std::vector<std::int64_t>;
using Span = std::span<const std::uint8_t>;

std::vector<ColumnSpec> columns() {
  return {{"ids", "ids", ColumnType::kInt64, ColumnLayout::kRagged, 1, {}},
          {"pair", "pair", ColumnType::kFloat32, ColumnLayout::kFixed, 2, 0.5},
          {"name", "name", ColumnType::kBytes, ColumnLayout::kFixed, 1, {}},
          {"tags", "tags", ColumnType::kBytes, ColumnLayout::kNested, 1, {}},
          {"lists", "lists", ColumnType::kInt64, ColumnLayout::kNested, 1, {}},
          {"price", "price", ColumnType::kFloat64, ColumnLayout::kRagged, 1, {}}};
}

// Adds `record` alone. A copy of exactly its size lets the address sanitizer see a read outside.
RecordParser::Progress add(RecordParser& parser, const std::string& record, const MessageOptions& options = {}) {
  const std::vector<std::uint8_t> exact(record.begin(), record.end());
  const std::vector<Span> messages{exact};
  return parser.add(messages, 0, 0, std::numeric_limits<std::size_t>::max(), options);
}

std::vector<ColumnData> parsed(const std::string& record) {
  RecordParser parser(RecordFormat::kJson, false, columns());
  const auto progress = add(parser, record);
  CHECK_EQ(progress.message, std::string());
  CHECK_EQ(parser.rows(), 1u);
  return parser.take();
}

std::string reason(const std::string& record) {
  RecordParser parser(RecordFormat::kJson, false, columns());
  const auto progress = add(parser, record);
  CHECK_EQ(progress.frame, 1u);
  CHECK_EQ(parser.rows(), progress.problem == Problem::kNone ? 1u : 0u);
  for (const ColumnData& column : parser.take()) {
    if (progress.problem != Problem::kNone) CHECK_EQ(column.int64.size() + column.bytes.size() + column.lengths.size(), 0u);
  }
  return progress.message;
}

const std::string kSample =
    R"({"ids": [1, -2], "pair": [0.25, 1e2], "name": "a\u00e9\ud834\udd1e", "tags": ["x", ""], "lists": [[1], []], "other": {"b": [true]}, "price": 0.1})";

}  // namespace

TEST("values of each kind go into their columns") {
  const std::vector<ColumnData> columns = parsed(kSample);
  CHECK(columns[0].int64 == (Numbers{1, -2}));
  CHECK(columns[1].float32 == (std::vector<float>{0.25f, 100.0f}));
  const std::string name = "a\xc3\xa9\xf0\x9d\x84\x9e";
  CHECK(std::string(columns[2].bytes.begin(), columns[2].bytes.end()) == name);
  CHECK(columns[3].lengths == (Numbers{1, 0}));
  CHECK(columns[3].list_splits == (Numbers{0, 2}));
  CHECK(columns[4].int64 == (Numbers{1}));
  CHECK(columns[4].lengths == (Numbers{1, 0}));
  CHECK(columns[5].float64 == (std::vector<double>{0.1}));
}

TEST("integers keep all their bits, with and without sign") {
  CHECK(parsed(R"({"ids": [9223372036854775807, -9223372036854775808, 18446744073709551615, -0]})")[0].int64 ==
        (Numbers{INT64_MAX, INT64_MIN, -1, 0}));
  for (const char* number : {"18446744073709551616", "-9223372036854775809", "99999999999999999999999", "1.0", "1e0", "-"}) {
    CHECK(!reason("{\"ids\": [" + std::string(number) + "]}").empty());
  }
}

TEST("decimal numbers are rounded once") {
  const auto value = [](const std::string& text) { return parsed("{\"price\": " + text + "}")[5].float64.at(0); };
  CHECK_EQ(value("9007199254740993"), 9007199254740992.0);
  CHECK_EQ(value("0.1000000000000000055511151231257827021181583404541015625"), 0.1);
  CHECK_EQ(value("123456789012345678901234567890e-10"), 12345678901234567890.123456789);
  CHECK_EQ(value("5e-324"), std::numeric_limits<double>::denorm_min());
  CHECK_EQ(value("1e-400"), 0.0);
  CHECK(std::signbit(value("-1e-400")));
  CHECK_EQ(value("1.7976931348623157e308"), std::numeric_limits<double>::max());
  CHECK_EQ(value("0." + std::string(400, '0') + "1e401"), 1.0);
  CHECK_EQ(value("0e999999999999999999999"), 0.0);
  CHECK(reason("{\"price\": 1e309}").find("got 1e309") != std::string::npos);
  CHECK(reason("{\"price\": 1" + std::string(400, '0') + "}").find("in the range of its type") != std::string::npos);
  CHECK(reason("{\"pair\": [1, 3.4028235677973366e38]}").find("in the range of its type") != std::string::npos);
}

TEST("decimal numbers of any size are those of the C library") {
  // Standard libraries differ in what reads a double, which is used when digits and exponent do not fit into exact factors.
  std::mt19937_64 random(11);
  for (int i = 0; i < 2000; ++i) {
    const int digits = 1 + static_cast<int>(random() % 25);
    // The smallest doubles are around 1e-308, with fewer and fewer bits below.
    const int exponent = static_cast<int>(random() % 640) - 330 - digits;
    std::string text = random() % 2 == 0 ? "-" : "";
    text += static_cast<char>('1' + random() % 9);
    for (int digit = 1; digit < digits; ++digit) text += static_cast<char>('0' + random() % 10);
    text += "e" + std::to_string(exponent);
    const double expected = std::strtod(text.c_str(), nullptr);
    if (std::isinf(expected)) continue;
    const double found = parsed("{\"price\": " + text + "}")[5].float64.at(0);
    CHECK_EQ(found, expected);
    CHECK_EQ(std::signbit(found), std::signbit(expected));
  }
}

TEST("every prefix of a record, and every byte of it changed, is an answer") {
  std::mt19937 random(7);
  RecordParser parser(RecordFormat::kJson, false, columns());
  for (std::size_t size = 0; size < kSample.size(); ++size) CHECK(!reason(kSample.substr(0, size)).empty());
  for (std::size_t at = 0; at < kSample.size(); ++at) {
    for (int i = 0; i < 20; ++i) {
      std::string changed = kSample;
      changed[at] = static_cast<char>(random());
      const std::size_t before = parser.rows();
      const auto progress = add(parser, changed);
      CHECK_EQ(parser.rows(), before + (progress.problem == Problem::kNone));
    }
  }
  parser.take();
}

TEST("depth is bounded, in what is skipped and in what is asked for") {
  CHECK(reason("{\"x\": " + std::string(60, '[') + std::string(60, ']') + "}").empty());
  CHECK(reason("{\"x\": " + std::string(1'000'000, '[')).find("nested too deeply") != std::string::npos);
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"x\":";
  CHECK(reason(objects).find("nested too deeply") != std::string::npos);
  CHECK(!reason("{\"lists\": " + std::string(1'000'000, '[')).empty());
}

TEST("text must be UTF-8, also in names and in what is skipped") {
  for (const std::string bad : {"\xff", "\x80", "\xc0\x80", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80", "\xf4\x90\x80\x80", "\xf8"}) {
    for (const std::string& text : {"{\"name\": \"" + bad + "\"}", "{\"x\": \"" + bad + "\"}", "{\"" + bad + "\": 1}",
                                    "{\"name\": \"12345678" + bad + "\"}"}) {
      CHECK(reason(text).find("not UTF-8") != std::string::npos);
    }
  }
  CHECK(reason("{\"name\": \"\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf\"}").empty());
}

TEST("a special byte is found at every place of a string") {
  for (std::size_t at = 0; at < 24; ++at) {
    std::string text(24, 'a');
    CHECK(reason("{\"name\": \"" + text + "\"}").empty());
    for (const char special : {'\x01', '\x1f', '\0', '\n'}) {
      text[at] = special;
      CHECK(reason("{\"name\": \"" + text + "\"}").find("control character") != std::string::npos);
    }
    text[at] = '\\';
    CHECK(!reason("{\"name\": \"" + text + "\"}").empty());
    text[at] = '"';
    CHECK(!reason("{\"name\": \"" + text + "\"}").empty());
    for (const char plain : {' ', '!', '#', '[', ']', '\x7f'}) {
      text[at] = plain;
      const std::vector<ColumnData> columns = parsed("{\"name\": \"" + text + "\"}");
      CHECK(std::string(columns[2].bytes.begin(), columns[2].bytes.end()) == text);
    }
  }
}

TEST("messages stop at the row limit, at a bad one, and at the size limit") {
  const std::string texts[] = {R"({"ids": 1})", R"({"ids": 2})", "bad", R"({"ids": 3})", R"({"ids": 4, "x": "too long"})"};
  std::vector<Span> messages;
  for (const std::string& text : texts) messages.emplace_back(reinterpret_cast<const std::uint8_t*>(text.data()), text.size());
  RecordParser parser(RecordFormat::kJson, false, columns());
  MessageOptions options;
  options.max_bytes = 15;
  auto progress = parser.add(messages, 0, 0, 1, options);
  CHECK_EQ(progress.frame, 1u);
  progress = parser.add(messages, progress.frame, 0, 9, options);
  CHECK(progress.problem == Problem::kCorrupt);
  CHECK_EQ(progress.frame, 3u);
  progress = parser.add(messages, progress.frame, 0, 9, options);
  CHECK(progress.problem == Problem::kCorrupt);
  CHECK(progress.message.find("more than max_record_bytes") != std::string::npos);
  CHECK_EQ(progress.frame, 5u);
  CHECK(parser.take()[0].int64 == (Numbers{1, 2, 3}));
}

TEST("a record that turns out to be bad at its end leaves nothing in any column") {
  const std::string good = R"({"ids": [7], "name": "a", "tags": ["x"], "lists": [[1, 2]], "price": 0.5})";
  const std::string endings[] = {R"("price": 1e999})", R"("price": "0.5"})", R"("price": 0.5, })", R"("price": 0.5} x)",
                                 R"("price": 0.5, "ids": [9]})", R"("price": 0.5)"};
  for (const std::string& ending : endings) {
    RecordParser parser(RecordFormat::kJson, false, columns());
    CHECK(add(parser, good).problem == Problem::kNone);
    CHECK(add(parser, R"({"ids": [8], "name": "b", "tags": ["y"], "lists": [[3]], )" + ending).problem != Problem::kNone);
    CHECK(add(parser, good).problem == Problem::kNone);
    CHECK_EQ(parser.rows(), 2u);
    const std::vector<ColumnData> found = parser.take();
    CHECK(found[0].int64 == (Numbers{7, 7}));
    CHECK(std::string(found[2].bytes.begin(), found[2].bytes.end()) == "aa");
    CHECK(std::string(found[3].bytes.begin(), found[3].bytes.end()) == "xx");
    CHECK(found[4].int64 == (Numbers{1, 2, 1, 2}));
    CHECK(found[5].float64 == (std::vector<double>{0.5, 0.5}));
  }
}

TEST("a name is compared after its escapes are read, and is there once") {
  CHECK(parsed(R"({"\u0069d\u0073": [5], "na\u006de": "x"})")[0].int64 == (Numbers{5}));
  CHECK(reason(R"({"ids": [1], "\u0069ds": [2]})").find("there twice") != std::string::npos);
  CHECK_EQ(reason(R"({"other": 1, "other": 2, "ids": [1]})"), std::string());
}

TEST("a field that is null is as one that is missing") {
  CHECK(parsed(R"({"ids": null, "name": "x"})")[0].int64.empty());
  CHECK(parsed(R"({"pair": null})")[1].float32 == (std::vector<float>{0.5f, 0.5f}));
  CHECK(reason(R"({"ids": [1, null]})").find("null") != std::string::npos);
}

TEST("a message in a frame is one record with its header") {
  const std::string json = "{}";
  for (const bool sort_id : {false, true}) {
    std::string framed;
    if (sort_id) framed += std::string("\x03\0\0\0\0\0\0\0abc", 11);
    framed += std::string("\x02\0\0\0\0\0\0\0", 8) + json;
    MessageOptions options;
    options.header = RecordHeader{false, false, sort_id, false};
    RecordParser parser(RecordFormat::kJson, false, columns());
    CHECK(add(parser, framed, options).problem == Problem::kNone);
    for (const std::string& bad : {framed + "x", framed + framed, framed.substr(0, framed.size() - 1), std::string()}) {
      CHECK(add(parser, bad, options).problem == Problem::kCorrupt);
    }
    CHECK_EQ(parser.rows(), 1u);
  }
}

TEST("memory that is refused is an exception") {
  const auto failures = failing_new::each_allocation(
      [] { return std::make_unique<RecordParser>(RecordFormat::kJson, false, columns()); },
      [&](std::unique_ptr<RecordParser>& parser) { add(*parser, kSample); }, [](std::unique_ptr<RecordParser>&) {});
  CHECK(failures >= 4);
}
