// Danger: an event that is cut, or of which one byte is another one, is read as if it were whole, or as another event: the reader is
// faster than one that builds the object, because it skips most of it. Whatever it takes has to be JSON for a reader that skips nothing,
// which is written here, and has to have the key, the time and the type that this one finds.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "monolith/event_reader.h"

namespace {

using monolith::EventReader;

struct NoJson {};

// RFC 8259, one byte at a time. Texts of the values of the outer object by their names, as they are written.
class PlainReader {
 public:
  explicit PlainReader(std::string_view text) : text_(text) {
    spaces();
    if (peek() != '{') throw NoJson{};
    value(&fields);
    if (at_ != text_.size()) throw NoJson{};
  }

  std::map<std::string, std::string> fields;

 private:
  int peek() const { return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : -1; }
  bool is_digit() const { return peek() >= '0' && peek() <= '9'; }
  bool take(char c) { return peek() == static_cast<unsigned char>(c) && ++at_ != 0; }
  void need(bool what) { if (!what) throw NoJson{}; }
  void spaces() { while (take(' ') || take('\t') || take('\n') || take('\r')) {} }

  void value(std::map<std::string, std::string>* fields_of = nullptr) {
    if (take('{')) {
      spaces();
      if (!take('}')) {
        do {
          spaces();
          const std::string name = string();
          spaces();
          need(take(':'));
          spaces();
          const std::size_t start = at_;
          value();
          std::size_t end = at_;
          while (std::string_view(" \t\n\r").find(text_[end - 1]) != std::string_view::npos) --end;
          if (fields_of != nullptr) (*fields_of)[name] = text_.substr(start, end - start);
        } while (take(','));
        need(take('}'));
      }
    } else if (take('[')) {
      spaces();
      if (!take(']')) {
        do spaces(), value();
        while (take(','));
        need(take(']'));
      }
    } else if (peek() == '"') {
      string();
    } else if (peek() == '-' || is_digit()) {
      take('-');
      if (!take('0')) digits();
      if (take('.')) digits();
      if (take('e') || take('E')) take('-') || take('+'), digits();
    } else {
      const std::string_view left = text_.substr(at_);
      const std::size_t size = left.starts_with("true") || left.starts_with("null") ? 4 : left.starts_with("false") ? 5 : 0;
      need(size != 0);
      at_ += size;
    }
    spaces();
  }

  void digits() {
    need(is_digit());
    while (is_digit()) ++at_;
  }

  // Escapes stay as they are, but for those of ASCII letters: names may have them.
  std::string string() {
    need(take('"'));
    std::string found;
    while (!take('"')) {
      need(peek() >= 0x20 && peek() < 0x80);
      found += text_[at_++];
      if (found.back() != '\\') continue;
      found += static_cast<char>(peek());
      need(peek() != -1 && std::string_view("\"\\/bfnrtu").find(found.back()) != std::string_view::npos);
      ++at_;
      if (found.back() != 'u') continue;
      const std::string hex(text_.substr(at_, 4));
      need(hex.size() == 4 && hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos);
      at_ += 4;
      const long code = std::strtol(hex.c_str(), nullptr, 16);
      need(code < 0xd800 || code > 0xdfff);
      found.replace(found.size() - 2, 2, code < 0x80 ? std::string(1, static_cast<char>(code)) : "\\u" + hex);
    }
    return found;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

const std::string kEvent = R"({"k\u0065y": "a-1", "x": [1, {"y": "\u00e9\n", "z": [-0.5e+7, []]}, true, null, {}],)"
                           R"( "time" : 1500, "w": false, "action": 17, "last": "longer than a word"})";

bool read(const std::string& record, EventReader::Event& event) {
  static EventReader reader({{"key"}, "time", 1, "action", {"clicked"}});
  // A copy of exactly its size lets the address sanitizer see a read outside. It stays until the next event, as `event` points into it.
  static std::vector<std::uint8_t> exact;
  exact = std::vector<std::uint8_t>(record.begin(), record.end());
  return reader.read(exact, event);
}

bool is_read(const std::string& record) {
  EventReader::Event event;
  return read(record, event);
}

// Whether it was read, and then as the plain reader reads it.
bool is_read_right(const std::string& record) {
  EventReader::Event event;
  if (!read(record, event)) return false;
  try {
    auto fields = PlainReader(record).fields;
    const auto unquoted = [](const std::string& text) { return text.starts_with('"') ? text.substr(1, text.size() - 2) : text; };
    const bool is_same = event.key == unquoted(fields["key"]) && event.type == unquoted(fields["action"]) && !fields.contains("clicked") &&
                         static_cast<double>(event.time) == std::nearbyint(std::strtod(fields["time"].c_str(), nullptr));
    if (!is_same) std::cerr << record << "\n";
    CHECK(is_same);
  } catch (const NoJson&) {
    std::cerr << record << "\n";
    CHECK(!"an event that is no JSON");
  }
  return true;
}

}  // namespace

TEST("an event that is cut anywhere is left to the careful reader") {
  REQUIRE(is_read_right(kEvent));
  std::size_t closed = 0;
  for (std::size_t size = 0; size < kEvent.size(); ++size) {
    CHECK(!is_read(kEvent.substr(0, size)));
    closed += is_read_right(kEvent.substr(0, size) + "}");
  }
  CHECK_EQ(closed, 3u);  // behind the "1" and the "17" of the action, and at the end
}

TEST("of an event with another byte, only what is still the same to a plain reader is read") {
  std::size_t taken = 0;
  for (std::size_t at = 0; at < kEvent.size(); ++at) {
    for (int byte = 0; byte < 0x80; ++byte) {
      std::string changed = kEvent;
      changed[at] = static_cast<char>(byte);
      taken += is_read_right(changed);
      changed.insert(at, kEvent, at, 1);
      taken += is_read_right(changed);
      if (byte == 0) taken += is_read_right(kEvent.substr(0, at) + kEvent.substr(at + 1));
    }
  }
  CHECK(taken > 5000);
}

TEST("a byte that no text may have is found at each place of a text, whatever length it has") {
  for (std::size_t size = 1; size < 40; ++size) {
    for (std::size_t at = 0; at < size; ++at) {
      const auto with = [&](const std::string& part) {
        std::string text(size, 'x');
        text.replace(at, 1, part);
        return R"({"key": 1, "time": 2, "action": 3, "skipped": ")" + text + "\"}";
      };
      for (const char* const bad : {"\x1f", "\n", "\xff", "\x80", "\xc1\xbf", "\xe2\x82", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\\x", "\\u12g4", "\"", "\\ud834"}) {
        CHECK(!is_read(with(bad)));
      }
      for (const char* const good : {"\x7f", "\xc2\x80", "\xe2\x82\xac", "\xf4\x8f\xbf\xbf", "\\\"", "\\u12f4", "\\ud834\\udd1e"}) {
        CHECK(is_read(with(good)));
      }
    }
  }
}

TEST("nested lists and objects are skipped up to a depth, and no deeper, however deep they are") {
  const auto nested = [](std::size_t depth, const char* open, const char* close) {
    std::string text = R"({"key": 1, "time": 2, "action": 3, "skipped": )";
    for (std::size_t i = 0; i < depth; ++i) text += open;
    text += "0";
    for (std::size_t i = 0; i < depth; ++i) text += close;
    return text + "}";
  };
  for (const auto& [open, close] : {std::pair{"[", "]"}, std::pair{R"({"key":)", "}"}, std::pair{R"([9,)", ",9]"}}) {
    CHECK(is_read_right(nested(64, open, close)));
    CHECK(!is_read(nested(65, open, close)));
    CHECK(!is_read(nested(100000, open, close)));
    CHECK(!is_read(nested(100000, open, "")));
  }
}

TEST("whole numbers of a key keep all their digits, and are left to the careful reader beyond 64 bits") {
  for (const char* const number : {"0", "-1", "9007199254740993", "9223372036854775807", "-9223372036854775807"}) {
    EventReader::Event event;
    REQUIRE(read(std::string(R"({"time": 2, "action": 3, "key": )") + number + "}", event));
    CHECK_EQ(std::string(event.key), std::string(number));
  }
  for (const char* const number : {"-", "+1", "01", "-01", "1.", ".5", "1e", "1e+", "0x10", "1_0", "9223372036854775808", "-9223372036854775809",
                                   "18446744073709551617", "100000000000000000000", "1e0", "1.0", "Infinity", "NaN", "-0"}) {
    CHECK(!is_read(std::string(R"({"time": 2, "action": 3, "key": )") + number + "}"));
  }
}
