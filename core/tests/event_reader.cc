// Danger: an event of whoever may write to a stream makes the reader look outside of its bytes, or is read although it is not JSON.
#include "monolith/event_reader.h"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace {

using monolith::EventReader;

struct Read {
  bool usual = false;
  std::string key;
  std::int64_t time = 0;
  std::string type;
};

Read read(const std::string& record, std::vector<std::string> key = {"key"}) {
  EventReader reader({std::move(key), "time", 1000, "action", {"clicked"}});
  // A copy of exactly its size lets the address sanitizer see a read outside.
  const std::vector<std::uint8_t> exact(record.begin(), record.end());
  EventReader::Event event;
  Read found;
  found.usual = reader.read(exact, event);
  if (found.usual) found.key = event.key, found.time = event.time, found.type = event.type;
  return found;
}

const std::string kSample = R"({"key": "a", "x": [1, {"y": "\u00e9"}], "time": 1.5, "action": "click"})";

std::string sample_with(const std::string& field) { return kSample.substr(0, kSample.size() - 1) + ", " + field + "}"; }

}  // namespace

TEST("key, time and type of an event are found") {
  const Read found = read(kSample);
  REQUIRE(found.usual);
  CHECK_EQ(found.key, std::string("a"));
  CHECK_EQ(found.time, 1500);
  CHECK_EQ(found.type, std::string("click"));
  CHECK_EQ(read(sample_with(R"("item": -12)"), {"key", "item"}).key, std::string(R"(["a","-12"])"));
  CHECK_EQ(read(sample_with(R"("key": "last")")).key, std::string("last"));
}

TEST("unusual events are left to a slower reader") {
  for (const char* field : {R"("key": "")", R"("key": "\u0061")", R"("key": null)", R"("key": 1.0)", R"("key": -0)",
                            R"("key": 9223372036854775808)", R"("time": "1")", R"("time": 0)", R"("time": 1e300)",
                            R"("action": true)", R"("clicked": 0)", R"("x": 1e400)", R"("x": [[1e309]])", R"("x": nul)",
                            R"("x": "\ud800")", R"("x")", ""}) {
    CHECK(!read(sample_with(field)).usual);
  }
  for (const char* record : {"", "{", "{}", "[]", "null", "\"key\""}) CHECK(!read(record).usual);
  CHECK(!read(kSample + "}").usual);
  CHECK(read(sample_with("\"key\": \"" + std::string(EventReader::kMaxKeyBytes, 'k') + "\"")).usual);
  CHECK(!read(sample_with("\"key\": \"" + std::string(EventReader::kMaxKeyBytes + 1, 'k') + "\"")).usual);
}

TEST("a time is read as it is written, in the unit that was given") {
  const auto time_of = [](const std::string& text) { return read(sample_with("\"time\": " + text)).time; };
  CHECK_EQ(time_of("7"), 7000);
  CHECK_EQ(time_of("7.0"), 7000);
  CHECK_EQ(time_of("7e1"), 70000);
  CHECK_EQ(time_of("1700000000.123"), 1700000000123);
  // Half of a millisecond goes to the even one, as in Python.
  CHECK_EQ(time_of("0.0015"), 2);
  CHECK_EQ(time_of("0.0025"), 2);
  CHECK_EQ(time_of("4503599627370.496"), 4503599627370496);
  for (const char* text : {"4503599627370.497", "4503599627371", "9223372036854775807", "-1", "0.0001", "18446744073709551616"}) {
    CHECK(!read(sample_with("\"time\": " + std::string(text))).usual);
  }
}

TEST("what is not in the object stays what it was") {
  EventReader reader({{}, {}, 1, {}, {}});
  const std::string record = R"({"key": "a", "time": 1})";
  const std::string other = "other";
  EventReader::Event event{other, 77, other};
  CHECK(reader.read({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()}, event));
  CHECK_EQ(std::string(event.key), other);
  CHECK_EQ(event.time, 77);
  CHECK_EQ(std::string(event.type), other);
}

TEST("one field may be the key and the time") {
  EventReader reader({{"at"}, "at", 1, "at", {}});
  const std::string record = R"({"at": 5})";
  EventReader::Event event;
  REQUIRE(reader.read({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()}, event));
  CHECK_EQ(std::string(event.key), std::string("5"));
  CHECK_EQ(event.time, 5);
  CHECK_EQ(std::string(event.type), std::string("5"));
}

TEST("texts in UTF-8 and spaces are usual") {
  const Read found = read("\t{ \"time\" : 1 , \"key\"\n: \"\xc3\xa9\" ,\r\"action\": \"\xf0\x9d\x84\x9e\" } \n");
  REQUIRE(found.usual);
  CHECK_EQ(found.key, std::string("\xc3\xa9"));
  CHECK_EQ(found.type, std::string("\xf0\x9d\x84\x9e"));
  CHECK(!read(sample_with("\"key\": \"\xc3\"")).usual);
  // Names are compared after their escapes are read.
  CHECK_EQ(read(sample_with(R"("k\u0065y": "b")")).key, std::string("b"));
  CHECK(!read(sample_with(R"("\u0063licked": 1)")).usual);
}

TEST("columns are added before the last brace") {
  const auto end_of = [](const std::string& object) {
    const auto end = monolith::end_of_fields({reinterpret_cast<const std::uint8_t*>(object.data()), object.size()});
    return object.substr(0, end.size) + (end.has_fields ? ",|" : "|");
  };
  CHECK_EQ(end_of(R"({"a": 1})"), std::string(R"({"a": 1,|)"));
  CHECK_EQ(end_of("{\"a\": {} \n} \t\r\n"), std::string(R"({"a": {},|)"));
  CHECK_EQ(end_of(R"({"a": "}"})"), std::string(R"({"a": "}",|)"));
  CHECK_EQ(end_of("{}"), std::string("{|"));
  CHECK_EQ(end_of("{ \n }"), std::string("{|"));
  CHECK_EQ(end_of(""), std::string("|"));
  CHECK_EQ(end_of("no object"), std::string("|"));
}

TEST("no damage leads outside of the event") {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    std::string record = kSample;
    for (int change = 0; change < 2; ++change) {
      record[random() % record.size()] = static_cast<char>(random() % 4 == 0 ? random() % 256 : "{}[]\",:\\u0123e"[random() % 14]);
    }
    record.resize(record.size() - random() % 4);
    read(record, {"key", "time"});
    const std::vector<std::uint8_t> exact(record.begin(), record.end());
    CHECK(monolith::end_of_fields(exact).size <= exact.size());
  }
}
