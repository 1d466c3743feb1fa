#include "json_reader.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace monolith {
namespace {

constexpr std::uint64_t kMaxExactDouble = std::uint64_t{1} << 53;
constexpr std::int64_t kMaxExponent = 1'000'000'000;

// Powers of ten that a double holds exactly.
constexpr std::array<double, 23> kPowers{1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                         1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};

bool is_digit(std::uint8_t byte) { return byte >= '0' && byte <= '9'; }

bool continues(std::uint8_t byte) { return (byte & 0xc0) == 0x80; }

// The length of the UTF-8 sequence at `at`, 0 if it is none: no overlong forms, no surrogates, nothing above U+10FFFF.
std::size_t utf8_length(const std::uint8_t* at, const std::uint8_t* end) {
  const std::uint8_t first = *at;
  const auto left = static_cast<std::size_t>(end - at);
  if (first >= 0xc2 && first <= 0xdf) return left >= 2 && continues(at[1]) ? 2 : 0;
  if ((first & 0xf0) == 0xe0) {
    if (left < 3 || !continues(at[1]) || !continues(at[2])) return 0;
    const bool overlong = first == 0xe0 && at[1] < 0xa0;
    const bool surrogate = first == 0xed && at[1] >= 0xa0;
    return overlong || surrogate ? 0 : 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (left < 4 || !continues(at[1]) || !continues(at[2]) || !continues(at[3])) return 0;
    const bool overlong = first == 0xf0 && at[1] < 0x90;
    const bool too_large = first == 0xf4 && at[1] >= 0x90;
    return overlong || too_large ? 0 : 4;
  }
  return 0;
}

void append_utf8(std::uint32_t code, std::string& out) {
  const auto put = [&out](std::uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xe0 | code >> 12);
    } else {
      put(0xf0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3f));
    }
    put(0x80 | (code >> 6 & 0x3f));
  }
  put(0x80 | (code & 0x3f));
}

}  // namespace

double JsonNumber::value() const {
  if (exact && digits == 0) return negative ? -0.0 : 0.0;
  // Both factors are exact here, so the one rounding is the right one.
  if (exact && digits <= kMaxExactDouble && exponent >= -22 && exponent <= 22) {
    const auto mantissa = static_cast<double>(digits);
    const double size = exponent < 0 ? mantissa / kPowers[-exponent] : mantissa * kPowers[exponent];
    return negative ? -size : size;
  }
  double parsed = 0;
#if defined(_LIBCPP_VERSION) && _LIBCPP_VERSION < 200000
  // Its from_chars reads whole numbers only. Both round to the nearest double.
  static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
  errno = 0;
  parsed = strtod_l(std::string(text).c_str(), nullptr, plain);
  if (errno != ERANGE || std::fpclassify(parsed) == FP_SUBNORMAL) return parsed;
#else
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (error == std::errc{}) return parsed;
#endif
  // "Out of range" does not say on which side: digits * 10^exponent does, as no double is that far from 1.
  const double size = exponent > 0 ? std::numeric_limits<double>::infinity() : 0.0;
  return negative ? -size : size;
}

void JsonReader::fail(const char* what) const { throw JsonDamage{what, static_cast<std::size_t>(at_ - begin_)}; }

std::string JsonReader::excerpt() {
  constexpr std::size_t kLongest = 32;
  const bool quoted = next() == '"';
  const std::string_view rest(reinterpret_cast<const char*>(at_), static_cast<std::size_t>(end_ - at_));
  const std::size_t close = quoted ? rest.find('"', 1) : rest.find_first_of(",]} \t\r\n", 1);
  const std::size_t size = close == std::string_view::npos ? rest.size() : close + quoted;
  std::string text(rest.substr(0, std::min(size, kLongest)));
  std::replace_if(text.begin(), text.end(), [](char letter) { return letter < ' ' || letter > '~'; }, '?');
  return size > kLongest ? text + "..." : text;
}

void JsonReader::literal(std::string_view text) {
  const auto left = static_cast<std::size_t>(end_ - at_);
  if (left < text.size() || std::memcmp(at_, text.data(), text.size()) != 0) fail("expected a value");
  at_ += text.size();
}

void JsonReader::skip_utf8() {
  const std::size_t length = utf8_length(at_, end_);
  if (length == 0) fail("bytes that are not UTF-8");
  at_ += length;
}

std::string_view JsonReader::escaped_string(const std::uint8_t* start) {
  const std::uint8_t* kept = start;  // what lies before it is in scratch_, or there were no escapes
  scratch_.clear();
  while (true) {
    if (at_ == end_) fail("a string that does not end");
    if (*at_ == '"') break;
    if (*at_ == '\\') {
      scratch_.append(kept, at_);
      ++at_;
      read_escape();
      kept = at_;
    } else if (*at_ < 0x20) {
      fail("a control character in a string");
    } else {
      skip_utf8();
    }
    skip_plain();
  }
  scratch_.append(kept, at_++);
  return scratch_;
}

void JsonReader::read_escape() {
  if (at_ == end_) fail("a string that does not end");
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeant = "\"\\/\b\f\n\r\t";
  const std::uint8_t letter = *at_++;
  if (letter != 'u') {
    const std::size_t which = kLetters.find(static_cast<char>(letter));
    if (which == std::string_view::npos) --at_, fail("an escape that JSON does not have");
    scratch_.push_back(kMeant[which]);
    return;
  }
  std::uint32_t code = hex4();
  if (code >= 0xd800 && code < 0xe000) {
    const bool pair = code < 0xdc00 && end_ - at_ >= 2 && at_[0] == '\\' && at_[1] == 'u';
    if (!pair) fail("half of a surrogate pair");
    at_ += 2;
    const std::uint32_t low = hex4();
    if (low < 0xdc00 || low >= 0xe000) fail("half of a surrogate pair");
    code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
  }
  append_utf8(code, scratch_);
}

std::uint32_t JsonReader::hex4() {
  if (end_ - at_ < 4) fail("\\u needs four hexadecimal digits");
  std::uint32_t code = 0;
  const char* const digits = reinterpret_cast<const char*>(at_);
  const auto [end, error] = std::from_chars(digits, digits + 4, code, 16);
  if (error != std::errc{} || end != digits + 4) fail("\\u needs four hexadecimal digits");
  at_ += 4;
  return code;
}

void JsonReader::digits(JsonNumber& number, bool fraction) {
  if (at_ == end_ || !is_digit(*at_)) fail("expected a digit");
  // So many more can be read without looking at each.
  const std::uint8_t* const sure = at_ + std::min<std::ptrdiff_t>(end_ - at_, number.digits == 0 ? 19 : 0);
  const std::uint8_t* const first = at_;
  while (at_ != sure && is_digit(*at_)) number.digits = number.digits * 10 + (*at_++ - '0');
  if (fraction) number.exponent -= at_ - first;
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  for (; at_ != end_ && is_digit(*at_); ++at_) {
    const std::uint64_t digit = *at_ - '0';
    if (number.exact && number.digits <= (kMax - digit) / 10) {
      number.digits = number.digits * 10 + digit;
      number.exponent -= fraction;
    } else {
      number.exact = false;
      number.exponent += !fraction;
    }
  }
}

JsonNumber JsonReader::number() {
  next();
  const std::uint8_t* const start = at_;
  JsonNumber number;
  number.negative = at_ != end_ && *at_ == '-';
  at_ += number.negative;
  const bool zero = at_ != end_ && *at_ == '0';
  if (zero) {
    ++at_;
    if (at_ != end_ && is_digit(*at_)) fail("a number that begins with 0");
  } else {
    digits(number, false);
  }
  if (at_ != end_ && *at_ == '.') {
    ++at_;
    number.integral = false;
    digits(number, true);
  }
  if (at_ != end_ && (*at_ == 'e' || *at_ == 'E')) {
    ++at_;
    number.integral = false;
    const bool less = at_ != end_ && *at_ == '-';
    at_ += less || (at_ != end_ && *at_ == '+');
    if (at_ == end_ || !is_digit(*at_)) fail("expected a digit");
    std::int64_t exponent = 0;
    for (; at_ != end_ && is_digit(*at_); ++at_) exponent = std::min(exponent * 10 + (*at_ - '0'), kMaxExponent);
    number.exponent += less ? -exponent : exponent;
  }
  number.text = {reinterpret_cast<const char*>(start), static_cast<std::size_t>(at_ - start)};
  largest_exponent_ = std::max(largest_exponent_, number.exponent);
  return number;
}

void JsonReader::skip(int depth) {
  if (depth > kMaxDepth) fail("lists and objects that are nested too deeply");
  switch (next()) {
    case '"': string(); break;
    case '[': list([this, depth] { skip(depth + 1); }); break;
    case '{':
      ++at_;
      if (take('}')) break;
      do {
        key();
        skip(depth + 1);
      } while (take(','));
      expect('}', "expected ',' or '}' in an object");
      break;
    case 't':
    case 'f': boolean(); break;
    case 'n': literal("null"); break;
    case 'N':
    case 'I': fail("NaN and Infinity are not JSON");
    default:
      if (!at_number()) fail("expected a value");
      number();
  }
}

}  // namespace monolith
