// Reads the head of the usual request over HTTP/1.1: a POST whose body has a stated length, on a connection that stays open.
//
// Whatever else a request may have, or have wrong, is left to the reader of all requests (llhttp). It accepts everything that is
// accepted here, and finds the same in it.
//
// Thread-safety: pure functions. Ownership: what is found points into the request. Failure: std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace monolith {

struct HttpHeader {
  std::string_view name, value;  // the name as it was sent
};

struct HttpPost {
  std::string_view url;
  std::vector<HttpHeader> headers;  // with different names, whatever the case of their letters
  std::size_t body;                 // where it begins; it ends with `data`
};

inline constexpr std::size_t kMaxHttpHead = std::size_t{1} << 13;
inline constexpr std::size_t kMaxHttpHeaders = 32;

// The request that is the whole of `data`. Nothing if it is unusual, or if only a part of it or more than it is there.
std::optional<HttpPost> read_post(std::span<const std::uint8_t> data);

// ASCII only, as names of headers are.
constexpr char lower_case(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 32) : letter; }

}  // namespace monolith
