// Reads JSON (RFC 8259) strictly, value by value: no NaN, no comments, no trailing commas, strings in valid UTF-8. A depth that
// skipped values may not exceed keeps the stack bounded. Every step is bounds checked; what is not JSON throws JsonDamage.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "wire.h"

namespace monolith {

struct JsonDamage {
  const char* what;
  std::size_t at;  // byte of the text
};

// A number as it is written: (-) digits * 10^exponent.
struct JsonNumber {
  std::string_view text;
  bool negative = false;
  bool integral = true;  // no fraction and no exponent, not even ".0"
  bool exact = true;     // `digits` has all of them
  std::uint64_t digits = 0;
  std::int64_t exponent = 0;

  // The nearest double. Infinite if there is none.
  double value() const;
};

class JsonReader {
 public:
  static constexpr int kMaxDepth = 64;

  // `scratch` holds the last string that had escapes.
  JsonReader(wire::Bytes text, std::string& scratch)
      : begin_(text.data()), at_(begin_), end_(begin_ + text.size()), scratch_(scratch) {}

  // The first byte of what follows, 0 at the end.
  std::uint8_t next() {
    while (at_ != end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\r' || *at_ == '\t')) ++at_;
    return at_ == end_ ? 0 : *at_;
  }

  bool take(char punctuation) {
    if (next() != static_cast<std::uint8_t>(punctuation) || at_ == end_) return false;
    ++at_;
    return true;
  }

  void expect(char punctuation, const char* otherwise) {
    if (!take(punctuation)) fail(otherwise);
  }

  // Valid until the next string is read.
  std::string_view string() {
    if (next() != '"') fail("expected a string");
    const std::uint8_t* const start = ++at_;
    skip_plain();
    if (at_ == end_ || *at_ != '"') return escaped_string(start);
    return {reinterpret_cast<const char*>(start), static_cast<std::size_t>(at_++ - start)};
  }

  std::string_view key() {
    if (next() != '"') fail("expected the name of a field, a string");
    const std::string_view name = string();
    expect(':', "expected ':' after the name of a field");
    return name;
  }

  // Calls `element` at each value of a list, which must be there.
  template <typename Element>
  void list(Element element) {
    expect('[', "expected a list");
    if (take(']')) return;
    do element();
    while (take(','));
    expect(']', "expected ',' or ']' in a list");
  }

  bool take_null() { return next() == 'n' && (literal("null"), true); }
  bool at_bool() { return next() == 't' || next() == 'f'; }
  bool boolean() {
    const bool is_true = next() == 't';
    literal(is_true ? "true" : "false");
    return is_true;
  }

  bool at_number() { return next() == '-' || (next() >= '0' && next() <= '9'); }
  JsonNumber number();

  // Any value. It must be valid JSON.
  void skip(int depth = 0);

  void end() {
    if (next(); at_ != end_) fail("expected the end of the record after its object");
  }

  // Of all numbers so far: whether one may be larger than a double can be.
  std::int64_t largest_exponent() const { return largest_exponent_; }

  using Mark = const std::uint8_t*;
  Mark mark() const { return at_; }
  void go_back(Mark mark) { at_ = mark; }
  // The beginning of what follows, for a message.
  std::string excerpt();

  [[noreturn]] void fail(const char* what) const;

 private:
  void skip_plain() {
    constexpr std::uint64_t kOnes = 0x0101010101010101;
    constexpr std::uint64_t kHighs = kOnes * 0x80;
    for (; end_ - at_ >= 8; at_ += 8) {
      std::uint64_t word;
      std::memcpy(&word, at_, sizeof word);
      const std::uint64_t quotes = word ^ (kOnes * '"');
      const std::uint64_t slashes = word ^ (kOnes * '\\');
      // Of each of these the lowest byte found is right, and only the lowest one is used.
      const std::uint64_t special = (((quotes - kOnes) & ~quotes) | ((slashes - kOnes) & ~slashes) |
                                     ((word - kOnes * 0x20) & ~word) | word) & kHighs;
      if (special != 0) {
        at_ += std::countr_zero(special) / 8;
        return;
      }
    }
    while (at_ != end_ && *at_ >= 0x20 && *at_ < 0x80 && *at_ != '"' && *at_ != '\\') ++at_;
  }

  std::string_view escaped_string(const std::uint8_t* start);
  void read_escape();
  std::uint32_t hex4();
  void skip_utf8();
  void digits(JsonNumber& number, bool fraction);
  void literal(std::string_view text);

  const std::uint8_t* begin_;
  const std::uint8_t* at_;
  const std::uint8_t* end_;
  std::string& scratch_;
  std::int64_t largest_exponent_ = 0;
};

}  // namespace monolith
