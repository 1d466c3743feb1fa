#include "monolith/http_request.h"

#include <algorithm>

namespace monolith {
namespace {

constexpr std::string_view kMethod = "POST /";
constexpr std::string_view kVersion = " HTTP/1.1\r\n";

constexpr bool is_letter_or_digit(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

constexpr bool in_url(char c) { return is_letter_or_digit(c) || c == '/' || c == '-' || c == '_' || c == '.' || c == '%'; }

constexpr bool in_name(char c) { return is_letter_or_digit(c) || c == '-' || c == '_'; }

bool same_name(std::string_view one, std::string_view other) {
  return std::ranges::equal(one, other, {}, lower_case, lower_case);
}

// Those that decide where a message ends, or whether it is one of this protocol.
bool changes_protocol(const HttpHeader& header) {
  if (same_name(header.name, "connection")) return !same_name(header.value, "keep-alive");
  constexpr std::string_view kOthers[] = {"transfer-encoding", "upgrade", "expect", "proxy-connection"};
  return std::ranges::any_of(kOthers, [&](std::string_view other) { return same_name(header.name, other); });
}

// Nothing if it is not a number of up to nine digits.
std::optional<std::size_t> length_of(std::string_view text) {
  if (text.size() > 9) return {};
  std::size_t length = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '9') return {};
    length = length * 10 + static_cast<std::size_t>(digit - '0');
  }
  return length;
}

}  // namespace

std::optional<HttpPost> read_post(std::span<const std::uint8_t> data) {
  const std::string_view all(reinterpret_cast<const char*>(data.data()), data.size());
  if (!all.starts_with(kMethod)) return {};
  std::string_view left = all.substr(0, kMaxHttpHead);
  left.remove_prefix(kMethod.size() - 1);
  HttpPost found;
  found.url = left.substr(0, static_cast<std::size_t>(std::ranges::find_if_not(left, in_url) - left.begin()));
  left.remove_prefix(found.url.size());
  if (!left.starts_with(kVersion)) return {};
  left.remove_prefix(kVersion.size());
  std::optional<std::size_t> length;
  found.headers.reserve(8);
  while (!left.starts_with("\r\n")) {
    HttpHeader header;
    header.name = left.substr(0, static_cast<std::size_t>(std::ranges::find_if_not(left, in_name) - left.begin()));
    left.remove_prefix(header.name.size());
    if (header.name.empty() || !left.starts_with(": ")) return {};
    left.remove_prefix(2);
    const auto end = std::ranges::find_if_not(left, [](char c) { return c >= ' ' && c <= '~'; });
    header.value = left.substr(0, static_cast<std::size_t>(end - left.begin()));
    left.remove_prefix(header.value.size());
    if (header.value.empty() || header.value.front() == ' ' || header.value.back() == ' ' || !left.starts_with("\r\n")) return {};
    left.remove_prefix(2);
    const auto is_same = [&](const HttpHeader& other) { return same_name(header.name, other.name); };
    if (found.headers.size() == kMaxHttpHeaders || std::ranges::any_of(found.headers, is_same) || changes_protocol(header)) return {};
    if (same_name(header.name, "content-length")) {
      length = length_of(header.value);
      if (!length) return {};
    }
    found.headers.push_back(header);
  }
  left.remove_prefix(2);
  found.body = static_cast<std::size_t>(left.data() - all.data());
  if (!length || *length != all.size() - found.body) return {};
  return found;
}

}  // namespace monolith
