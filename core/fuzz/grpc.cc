// Connections of gRPC, from whoever reaches the port: whatever bytes come, in whatever parts, and whatever is answered meanwhile,
// limits hold, every request is whole, and what is sent is made of whole frames.
#include <algorithm>
#include <memory>
#include <string>

#include "fuzz.h"
#include "monolith/grpc_connection.h"

namespace {

using namespace monolith;

void check_frames(std::string_view output) {
  const auto byte = [&](std::size_t at) { return static_cast<std::size_t>(static_cast<unsigned char>(output[at])); };
  while (!output.empty()) {
    FUZZ_REQUIRE(output.size() >= 9);
    const std::size_t size = 9 + (byte(0) << 16 | byte(1) << 8 | byte(2));
    FUZZ_REQUIRE(size <= output.size() && byte(3) <= 8);
    output.remove_prefix(size);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto choices = input.take<std::uint8_t>();
  const auto cut = std::max<std::size_t>(1, input.take<std::uint8_t>());
  const Bytes bytes = input.rest();
  GrpcLimits limits;
  limits.max_streams = 3;
  limits.max_message_bytes = 4000;
  limits.max_header_bytes = 1000;
  const auto memory = std::make_shared<GrpcMemory>(GrpcMemory{.limit = 6000});
  {
    GrpcConnection connection(limits, memory, 0);
    double now = 0;
    for (std::size_t at = 0; at < bytes.size(); at += cut) {
      // A copy of exactly its size, so that a read behind it is seen.
      const Bytes part(bytes.begin() + static_cast<std::ptrdiff_t>(at), bytes.begin() + static_cast<std::ptrdiff_t>(std::min(bytes.size(), at + cut)));
      for (const GrpcRequest& request : connection.receive(part, now)) {
        FUZZ_REQUIRE(connection.is_open(request.stream) && request.framed.size() >= 5 && !request.path.empty());
        FUZZ_REQUIRE(request.message().size() <= limits.max_message_bytes);
        if ((choices & 1) != 0) connection.answer(request.stream, request.message());
        if ((choices & 2) != 0) connection.fail(request.stream, GrpcStatus::kInternal, request.path);
      }
      FUZZ_REQUIRE(connection.open_streams() <= limits.max_streams && memory->held <= memory->limit);
      FUZZ_REQUIRE(!connection.has_failed() || (connection.open_streams() == 0 && connection.is_over()));
      if ((choices & 4) != 0) connection.expire(now += 0.5);
      if ((choices & 8) != 0 && at > bytes.size() / 2) connection.go_away();
      check_frames(connection.take_output());
    }
    connection.expire(now + 1000);
    check_frames(connection.take_output());
  }
  FUZZ_REQUIRE(memory->held == 0);
  return 0;
}
