// Requests for predictions, from whoever reaches the port: whatever is in them, what is found lies in them, and has one shape.
#include <set>

#include "fuzz.h"
#include "monolith/http_request.h"
#include "monolith/infer_request.h"

namespace {

using monolith::InferRequest;

bool lies_in(const Bytes& bytes, std::string_view text) {
  const auto* const first = reinterpret_cast<const std::uint8_t*>(text.data());
  return text.empty() || (bytes.data() <= first && first + text.size() <= bytes.data() + bytes.size());
}

void check(const Bytes& bytes, const InferRequest* request) {
  if (request == nullptr) return;
  FUZZ_REQUIRE(request->rows > 0 && !request->names.empty() && request->ids.size() == request->rows * request->names.size());
  FUZZ_REQUIRE(std::set(request->names.begin(), request->names.end()).size() == request->names.size());
  for (const std::string_view name : request->names) FUZZ_REQUIRE(lies_in(bytes, name));
  FUZZ_REQUIRE(lies_in(bytes, request->id) && lies_in(bytes, request->model) && lies_in(bytes, request->version));
}

void post(const Bytes& bytes) {
  const auto found = monolith::read_post(bytes);
  if (!found) return;
  FUZZ_REQUIRE(found->body <= bytes.size() && found->body <= monolith::kMaxHttpHead && lies_in(bytes, found->url));
  FUZZ_REQUIRE(!found->headers.empty() && found->headers.size() <= monolith::kMaxHttpHeaders);
  for (const auto& [name, value] : found->headers) {
    FUZZ_REQUIRE(!name.empty() && !value.empty() && lies_in(bytes, name) && lies_in(bytes, value));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto kind = input.take<std::uint8_t>();
  const auto cut = input.take<std::uint16_t>();
  const Bytes bytes = input.rest();
  monolith::InferRequestReader reader;
  switch (kind & 3) {
    case 0: check(bytes, reader.json(bytes)); break;
    case 1: check(bytes, reader.message(bytes)); break;
    case 2: post(bytes); break;
    default: {
      // Each part is a copy of exactly its size, so that a read behind it is seen.
      const auto middle = bytes.begin() + static_cast<std::ptrdiff_t>(std::min<std::size_t>(cut, bytes.size()));
      const Bytes text(bytes.begin(), middle), tensors(middle, bytes.end());
      check(text, reader.binary(text, tensors));
    }
  }
  return 0;
}
