#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>

#include "module.h"
#include "monolith/http_request.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// (URL, headers, body), or None if another reader has to read it. The interpreter's lock is kept: it takes a microsecond.
nb::object read_post(const nb::bytes& data) {
  const auto found = monolith::read_post({static_cast<const std::uint8_t*>(data.data()), data.size()});
  if (!found) return nb::none();
  nb::dict headers;
  std::array<char, monolith::kMaxHttpHead> name;  // no header is longer than the head
  for (const monolith::HttpHeader& header : found->headers) {
    std::ranges::transform(header.name, name.begin(), monolith::lower_case);
    headers[nb::str(name.data(), header.name.size())] = nb::str(header.value.data(), header.value.size());
  }
  return nb::make_tuple(nb::bytes(found->url.data(), found->url.size()), headers,
                        nb::bytes(data.c_str() + found->body, data.size() - found->body));
}

}  // namespace

void init_http(nb::module_& m) {
  m.def("read_post", &read_post, "data"_a, nb::sig("def read_post(data: bytes) -> tuple[bytes, dict[str, str], bytes] | None"),
        "URL, headers by name in lower case, and body of a POST that is the whole of `data`. None if another reader has to read it.");
}
