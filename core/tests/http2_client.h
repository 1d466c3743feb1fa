// A client of HTTP/2 that a test writes frame by frame, and reads back what the server has sent.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/grpc_connection.h"

namespace http2 {

enum : std::uint8_t { kData, kHeaders, kPriority, kReset, kSettings, kPushPromise, kPing, kGoAway, kWindowUpdate, kContinuation };
enum : std::uint8_t { kEndStream = 1, kAck = 1, kEndHeaders = 4, kPadded = 8, kHasPriority = 0x20 };

inline const std::string kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

inline std::string u32(std::uint32_t value) {
  return {static_cast<char>(value >> 24), static_cast<char>(value >> 16), static_cast<char>(value >> 8), static_cast<char>(value)};
}

inline std::string frame(std::uint8_t type, std::uint8_t flags, std::uint32_t stream, const std::string& payload = "") {
  return u32(static_cast<std::uint32_t>(payload.size())).substr(1) + static_cast<char>(type) + static_cast<char>(flags) + u32(stream) + payload;
}

inline std::string setting(std::uint8_t name, std::uint32_t value) { return std::string{'\0', static_cast<char>(name)} + u32(value); }

inline std::string block(const std::vector<monolith::HeaderField>& fields) {
  std::string encoded;
  for (const auto& [name, value] : fields) monolith::encode_field(name, value, encoded);
  return encoded;
}

inline std::vector<monolith::HeaderField> usual_fields() {
  return {{":method", "POST"}, {":scheme", "http"}, {":path", "/s/m"}, {":authority", "a"}, {"content-type", "application/grpc"}, {"te", "trailers"}};
}

inline std::string framed(const std::string& message, bool compressed = false) {
  return std::string(1, compressed ? '\1' : '\0') + u32(static_cast<std::uint32_t>(message.size())) + message;
}

inline std::string call(std::uint32_t stream, const std::string& message) {
  return frame(kHeaders, kEndHeaders, stream, block(usual_fields())) + frame(kData, kEndStream, stream, framed(message));
}

struct Sent {
  std::uint8_t type, flags;
  std::uint32_t stream;
  std::string payload;
};

// What the server sends has no errors, so what is left over is a fault of it.
inline std::vector<Sent> frames(std::string_view output) {
  std::vector<Sent> found;
  const auto byte = [&](std::size_t at) { return static_cast<std::uint32_t>(static_cast<unsigned char>(output.at(at))); };
  while (!output.empty()) {
    const std::size_t size = byte(0) << 16 | byte(1) << 8 | byte(2);
    const std::uint32_t stream = byte(5) << 24 | byte(6) << 16 | byte(7) << 8 | byte(8);
    if (output.size() < 9 + size) throw std::out_of_range("a frame is cut");
    found.push_back({static_cast<std::uint8_t>(byte(3)), static_cast<std::uint8_t>(byte(4)), stream, std::string(output.substr(9, size))});
    output.remove_prefix(9 + size);
  }
  return found;
}

inline std::uint32_t number(const std::string& payload, std::size_t at = 0) {
  std::uint32_t value = 0;
  for (std::size_t i = at; i < at + 4; ++i) value = value << 8 | static_cast<unsigned char>(payload.at(i));
  return value;
}

// One connection, with the client's table of headers.
class Client {
 public:
  explicit Client(const monolith::GrpcLimits& limits = {}, std::size_t memory = 1 << 20)
      : memory_(std::make_shared<monolith::GrpcMemory>(monolith::GrpcMemory{.limit = memory})), server(limits, memory_, 0) {}

  // Sends the preface and settings.
  Client& open(const std::string& settings = "") {
    send(kPreface + frame(kSettings, 0, 0, settings));
    server.take_output();
    return *this;
  }

  std::vector<monolith::GrpcRequest> send(const std::string& data, double now = 0) {
    return server.receive({reinterpret_cast<const std::uint8_t*>(data.data()), data.size()}, now);
  }

  // As lines: "headers 1 end name=value ...", "data 1 bytes", "reset 1 code", "goaway last code".
  std::string received() {
    std::string text;
    for (const Sent& sent : frames(server.take_output())) {
      const std::string stream = " " + std::to_string(sent.stream);
      const std::string end = sent.type <= kHeaders && (sent.flags & kEndStream) != 0 ? " end" : "";
      switch (sent.type) {
        case kData: text += "data" + stream + end + " " + std::to_string(sent.payload.size()); body += sent.payload; break;
        case kHeaders: {
          text += "headers" + stream + end;
          std::vector<monolith::HeaderField> fields;
          decoder_.decode({reinterpret_cast<const std::uint8_t*>(sent.payload.data()), sent.payload.size()}, 1 << 14, fields);
          for (const auto& [name, value] : fields) {
            if (name == ":status" || name == "grpc-status" || name == "grpc-message") text += " " + name + "=" + value;
          }
          break;
        }
        case kReset: text += "reset" + stream + " " + std::to_string(number(sent.payload)); break;
        case kSettings: text += (sent.flags & kAck) != 0 ? "settings ack" : "settings"; break;
        case kPing: text += "ping " + sent.payload; break;
        case kGoAway: text += "goaway " + std::to_string(number(sent.payload)) + " " + std::to_string(number(sent.payload, 4)); break;
        case kWindowUpdate: text += "window" + stream + " " + std::to_string(number(sent.payload)); break;
        default: text += "?";
      }
      text += "\n";
    }
    return text;
  }

  std::size_t held() const { return memory_->held; }

 private:
  std::shared_ptr<monolith::GrpcMemory> memory_;
  monolith::HpackDecoder decoder_;

 public:
  monolith::GrpcConnection server;
  std::string body;  // of all DATA frames that were received
};

}  // namespace http2
