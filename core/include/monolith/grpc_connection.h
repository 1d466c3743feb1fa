// The server's side of one connection of gRPC: HTTP/2 (RFC 9113) as far as calls need it that have one message each way. It is given
// the bytes that come, hands out whole requests, and makes the bytes to send. It opens no socket and asks no clock.
//
// A client can make it hold or do no more than the limits say. What is wrong with one request ends that request, with a status of
// gRPC where the client can understand one. What leaves the two sides with different views of the connection ends the connection.
//
// Thread-safety: all connections that share a GrpcMemory are used by one thread at a time. Units: seconds, bytes.
// Failure: std::bad_alloc, after which the connection must not be used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "monolith/hpack.h"

namespace monolith {

// Those that the connection itself answers with. Others are for the caller.
enum class GrpcStatus : std::uint8_t { kDeadlineExceeded = 4, kResourceExhausted = 8, kUnimplemented = 12, kInternal = 13 };

// Errors of HTTP/2 (RFC 9113, section 7), of a connection or of a stream.
enum class Http2Error : std::uint32_t {
  kNone = 0,
  kProtocol = 1,
  kFlowControl = 3,
  kStreamClosed = 5,
  kFrameSize = 6,
  kRefusedStream = 7,
  kCompression = 9,
  kEnhanceYourCalm = 11,
};

// What the requests of all connections of a server hold together, from their first byte to the answer.
struct GrpcMemory {
  std::size_t limit;
  std::size_t held = 0;
};

struct GrpcLimits {
  std::uint32_t max_streams = 100;                       // calls at the same time
  std::size_t max_message_bytes = std::size_t{1} << 26;  // of a request
  std::size_t max_header_bytes = std::size_t{1} << 14;   // of a request, counting 32 for each header besides its text
  double request_secs = 10;                              // for a request to come as a whole
  double frame_secs = 30;                                // for a frame, or headers in several, to come as a whole
  double stall_secs = 75;                                // for a client to take more of an answer
  double idle_secs = 600;                                // without any frame or call
};

struct GrpcRequest {
  std::uint32_t stream;
  double arrived;  // of its headers
  std::string path;
  std::vector<HeaderField> metadata;  // without those that begin with ':'
  std::string framed;                 // the message with the five bytes before it

  bool is_compressed() const { return framed[0] != 0; }
  std::string_view message() const { return std::string_view(framed).substr(5); }
};

class GrpcConnection {
 public:
  using Bytes = std::span<const std::uint8_t>;

  GrpcConnection(const GrpcLimits& limits, std::shared_ptr<GrpcMemory> memory, double now);
  ~GrpcConnection();
  GrpcConnection(const GrpcConnection&) = delete;
  GrpcConnection& operator=(const GrpcConnection&) = delete;

  // Takes what has come, and returns the requests that are now complete, each of which is answered once.
  std::vector<GrpcRequest> receive(Bytes data, double now);

  // Each does nothing if the client has given up the call.
  void answer(std::uint32_t stream, std::string_view message);
  void fail(std::uint32_t stream, GrpcStatus status, std::string_view text);
  bool is_open(std::uint32_t stream) const { return streams_.contains(stream); }

  // Ends what has taken too long. Called every second or so.
  void expire(double now);
  // Accepts no further calls. Those that have begun are finished. Calling it twice is harmless.
  void go_away();

  // What is to be sent, in the order of these calls. It is given out once.
  std::string take_output() { return std::exchange(output_, {}); }
  std::size_t open_streams() const { return streams_.size(); }
  // Whether nothing more will be received: the connection is closed when the output is sent.
  bool is_over() const { return over_ || (going_away_ && streams_.empty()); }
  bool has_failed() const { return over_; }

 private:
  struct Stream {
    double arrived = 0;
    std::string path;
    std::vector<HeaderField> metadata;
    std::optional<std::uint64_t> length;  // of the body, if the client has said it
    std::string body;
    std::size_t held = 0;      // of the memory that all connections share
    std::size_t received = 0;  // since the client's window was last made larger
    std::int64_t send_window = 0;
    bool is_complete = false;    // whether the client has sent all of it
    std::string data, trailers;  // the answer; trailers are empty until it is known
    std::size_t sent = 0;

    bool is_answered() const { return !trailers.empty(); }
  };
  struct Frame;
  struct Failure;

  std::size_t parse(Bytes data, std::vector<GrpcRequest>& requests);
  void frame(const Frame& frame, std::vector<GrpcRequest>& requests);
  void data_frame(const Frame& frame, std::vector<GrpcRequest>& requests);
  void headers_frame(const Frame& frame, std::vector<GrpcRequest>& requests);
  void reset_frame(const Frame& frame);
  void settings_frame(const Frame& frame);
  void window_frame(const Frame& frame);
  void end_block(std::vector<GrpcRequest>& requests);
  void begin_stream(std::uint32_t id, std::vector<HeaderField>& fields, bool fits);
  bool hold(std::uint32_t id, Stream& stream, std::size_t bytes);
  void append(std::uint32_t id, Stream& stream, Bytes data);
  void complete(std::uint32_t id, std::vector<GrpcRequest>& requests);

  Stream* find(std::uint32_t id);
  void close(std::uint32_t id);
  void reset(std::uint32_t id, Http2Error error);
  void spend();
  void end(Http2Error error, std::string_view text);
  void send(std::uint32_t id, Stream& stream);
  void send_pending();
  void append_headers(std::uint32_t id, std::string_view block, bool is_last);

  const GrpcLimits limits_;
  const std::shared_ptr<GrpcMemory> memory_;
  HpackDecoder decoder_;
  std::map<std::uint32_t, Stream> streams_;  // those that are not answered as a whole
  std::string output_;
  // What has come of the connection's preface, or of a frame, that is not complete.
  std::vector<std::uint8_t> partial_;
  bool has_preface_ = false, has_settings_ = false;
  // Headers that are not complete.
  std::uint32_t block_stream_ = 0;  // 0: none
  bool block_ends_stream_ = false;
  std::size_t block_frames_ = 0;
  std::vector<std::uint8_t> block_;
  // Streams ended by this side, of which frames may still be in transit.
  std::deque<std::uint32_t> cut_;
  std::uint32_t last_stream_ = 0;
  std::size_t received_ = 0;
  std::int64_t send_window_, first_send_window_;
  std::int64_t allowed_resets_;
  bool has_encoded_ = false, going_away_ = false, over_ = false;
  double now_, whole_since_, heard_at_, moved_at_;
};

}  // namespace monolith
