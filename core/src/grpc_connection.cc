#include "monolith/grpc_connection.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <utility>

namespace monolith {
namespace {

using Bytes = GrpcConnection::Bytes;

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr std::size_t kFrameHead = 9, kMessageHead = 5;
constexpr std::size_t kMaxFrame = 1 << 14;  // which every peer accepts
constexpr std::int64_t kDefaultWindow = 65535, kMaxWindow = 0x7fffffff;
// How far a client may send ahead. Messages are kept as a whole, so a small window would only slow down large ones.
constexpr std::size_t kStreamWindow = 1 << 20, kConnectionWindow = 1 << 22;
constexpr std::size_t kKeptCuts = 256;
// Calls that a client may give up, or begin wrongly, beyond those that it lets be answered: resetting a call at once costs it less than
// the call costs the server, and does not count as one of the calls at the same time.
constexpr std::int64_t kResets = 512;
constexpr std::size_t kMaxText = 1 << 10;

enum Type : std::uint8_t { kData, kHeaders, kPriority, kReset, kSettings, kPushPromise, kPing, kGoAway, kWindowUpdate, kContinuation };
enum Flag : std::uint8_t { kEndStream = 1, kAck = 1, kEndHeaders = 4, kPadded = 8, kHasPriority = 0x20 };
enum Setting : std::uint16_t { kEnablePush = 2, kMaxStreams = 3, kInitialWindow = 4, kMaxFrameSize = 5, kMaxHeaderList = 6 };

std::uint32_t read_u32(Bytes data) {
  return static_cast<std::uint32_t>(data[0]) << 24 | static_cast<std::uint32_t>(data[1]) << 16 | static_cast<std::uint32_t>(data[2]) << 8 | data[3];
}

void append_u32(std::uint32_t value, std::string& out) {
  for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<char>(value >> shift));
}

void append_head(std::size_t size, std::uint8_t type, unsigned flags, std::uint32_t stream, std::string& out) {
  out.push_back(static_cast<char>(size >> 16));
  out.push_back(static_cast<char>(size >> 8));
  out.push_back(static_cast<char>(size));
  out.push_back(static_cast<char>(type));
  out.push_back(static_cast<char>(flags));
  append_u32(stream, out);
}

void append_setting(std::uint16_t setting, std::uint32_t value, std::string& out) {
  out.push_back(static_cast<char>(setting >> 8));
  out.push_back(static_cast<char>(setting));
  append_u32(value, out);
}

void append_window(std::uint32_t stream, std::size_t more, std::string& out) {
  append_head(4, kWindowUpdate, 0, stream, out);
  append_u32(static_cast<std::uint32_t>(more), out);
}

std::string answer_block() {
  std::string block = "\x88";  // :status 200, of the static table
  encode_field("content-type", "application/grpc", block);
  encode_field("grpc-accept-encoding", "identity, deflate, gzip", block);
  return block;
}

// As gRPC writes grpc-message: what is not printable ASCII as %XX.
std::string percent_encoded(std::string_view text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text.substr(0, kMaxText)) {
    if (c >= ' ' && c <= '~' && c != '%') {
      out.push_back(c);
    } else {
      const auto byte = static_cast<unsigned char>(c);
      out.append({'%', kDigits[byte >> 4], kDigits[byte & 15]});
    }
  }
  return out;
}

std::string trailers(GrpcStatus status, std::string_view text) {
  std::string block;
  encode_field("grpc-status", std::to_string(static_cast<int>(status)), block);
  if (!text.empty()) encode_field("grpc-message", percent_encoded(text), block);
  return block;
}

bool is_name(std::string_view name) {
  return !name.empty() && std::ranges::all_of(name, [](char c) { return c > ' ' && c < 0x7f && !(c >= 'A' && c <= 'Z') && c != ':'; });
}

bool is_value(std::string_view value) {
  const auto is_blank = [](char c) { return c == ' ' || c == '\t'; };
  if (!value.empty() && (is_blank(value.front()) || is_blank(value.back()))) return false;
  return std::ranges::none_of(value, [](char c) { return c == '\0' || c == '\r' || c == '\n'; });
}

// What a request says in its headers that HTTP/2 itself needs (RFC 9113, section 8.2 and 8.3).
struct Head {
  std::string method, path;
  bool is_grpc = false;
  std::optional<std::uint64_t> length;
  std::vector<HeaderField> metadata;
};

std::optional<std::uint64_t> number_of(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && end == text.data() + text.size() ? std::optional(value) : std::nullopt;
}

bool is_header(const HeaderField& field) {
  constexpr std::string_view kOfConnections[] = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"};
  return is_name(field.name) && is_value(field.value) && std::ranges::find(kOfConnections, field.name) == std::end(kOfConnections) &&
         (field.name != "te" || field.value == "trailers");
}

bool is_grpc(std::string_view content_type) {
  constexpr std::string_view kGrpc = "application/grpc";
  if (!content_type.starts_with(kGrpc)) return false;
  content_type.remove_prefix(kGrpc.size());
  return content_type.empty() || content_type.front() == '+' || content_type.front() == ';';
}

// Takes the fields. Nothing if they are not those of a request.
std::optional<Head> head_of(std::vector<HeaderField>& fields) {
  constexpr std::array<std::string_view, 4> kPseudo = {":method", ":scheme", ":path", ":authority"};
  unsigned seen = 0;
  Head head;
  for (HeaderField& field : fields) {
    if (field.name.starts_with(':')) {
      const auto place = static_cast<unsigned>(std::ranges::find(kPseudo, field.name) - kPseudo.begin());
      if (place == kPseudo.size() || (seen & 1u << place) != 0 || !head.metadata.empty() || !is_value(field.value)) return {};
      seen |= 1u << place;
      if (place == 0) head.method = std::move(field.value);
      if (place == 2) head.path = std::move(field.value);
      continue;
    }
    if (!is_header(field)) return {};
    if (field.name == "content-length") {
      const auto length = number_of(field.value);
      if (!length || (head.length && head.length != length)) return {};
      head.length = length;
    }
    if (field.name == "content-type") head.is_grpc = is_grpc(field.value);
    head.metadata.push_back(std::move(field));
  }
  if ((seen & 7) != 7 || head.path.empty()) return {};
  return head;
}

}  // namespace

struct GrpcConnection::Failure {
  Http2Error error;
  const char* text;
};

struct GrpcConnection::Frame {
  std::uint8_t type, flags;
  std::uint32_t stream;
  Bytes payload;

  bool has(Flag flag) const { return (flags & flag) != 0; }

  // Without the padding that it may have.
  Bytes unpadded() const {
    if (!has(kPadded)) return payload;
    if (payload.empty() || payload[0] >= payload.size()) throw Failure{Http2Error::kProtocol, "a frame has more padding than bytes"};
    return payload.subspan(1, payload.size() - 1 - payload[0]);
  }
};

GrpcConnection::GrpcConnection(const GrpcLimits& limits, std::shared_ptr<GrpcMemory> memory, double now)
    : limits_(limits),
      memory_(std::move(memory)),
      send_window_(kDefaultWindow),
      first_send_window_(kDefaultWindow),
      allowed_resets_(kResets),
      now_(now),
      whole_since_(now),
      heard_at_(now),
      moved_at_(now) {
  append_head(18, kSettings, 0, 0, output_);
  append_setting(kMaxStreams, limits_.max_streams, output_);
  append_setting(kInitialWindow, kStreamWindow, output_);
  append_setting(kMaxHeaderList, static_cast<std::uint32_t>(limits_.max_header_bytes), output_);
  append_window(0, kConnectionWindow - std::size_t{kDefaultWindow}, output_);
}

GrpcConnection::~GrpcConnection() {
  for (const auto& [_, stream] : streams_) memory_->held -= stream.held;
}

std::vector<GrpcRequest> GrpcConnection::receive(Bytes data, double now) {
  std::vector<GrpcRequest> requests;
  if (over_) return requests;
  now_ = now;
  try {
    if (partial_.empty()) {
      if (has_settings_ && block_stream_ == 0) whole_since_ = now;
      const std::size_t used = parse(data, requests);
      partial_.assign(data.begin() + static_cast<std::ptrdiff_t>(used), data.end());
    } else {
      partial_.insert(partial_.end(), data.begin(), data.end());
      const std::size_t used = parse(partial_, requests);
      partial_.erase(partial_.begin(), partial_.begin() + static_cast<std::ptrdiff_t>(used));
      if (partial_.empty()) partial_.shrink_to_fit();
    }
  } catch (const Failure& failure) {
    end(failure.error, failure.text);
  } catch (const HpackError&) {
    end(Http2Error::kCompression, "headers cannot be read");
  }
  std::erase_if(requests, [&](const GrpcRequest& request) { return !is_open(request.stream); });  // given up since
  return requests;
}

// Returns how much was used.
std::size_t GrpcConnection::parse(Bytes data, std::vector<GrpcRequest>& requests) {
  std::size_t used = 0;
  if (!has_preface_) {
    const std::size_t size = std::min(data.size(), kPreface.size());
    if (!std::equal(kPreface.begin(), kPreface.begin() + static_cast<std::ptrdiff_t>(size), data.begin())) {
      throw Failure{Http2Error::kProtocol, "expected the preface of HTTP/2"};
    }
    if (size < kPreface.size()) return 0;
    has_preface_ = true;
    used = size;
  }
  while (data.size() - used >= kFrameHead) {
    const Bytes head = data.subspan(used, kFrameHead);
    const std::size_t size = static_cast<std::size_t>(head[0]) << 16 | static_cast<std::size_t>(head[1]) << 8 | head[2];
    if (size > kMaxFrame) throw Failure{Http2Error::kFrameSize, "a frame is longer than this side has allowed"};
    if (data.size() - used - kFrameHead < size) break;
    frame({.type = head[3], .flags = head[4], .stream = read_u32(head.subspan(5)) & 0x7fffffff, .payload = data.subspan(used + kFrameHead, size)},
          requests);
    used += kFrameHead + size;
    if (block_stream_ == 0) whole_since_ = heard_at_ = now_;
  }
  return used;
}

void GrpcConnection::frame(const Frame& frame, std::vector<GrpcRequest>& requests) {
  const auto require = [](bool right, Http2Error error, const char* text) {
    if (!right) throw Failure{error, text};
  };
  if (!has_settings_) {
    require(frame.type == kSettings && !frame.has(kAck), Http2Error::kProtocol, "expected settings first");
    has_settings_ = true;
  }
  if (block_stream_ != 0) {
    require(frame.type == kContinuation && frame.stream == block_stream_, Http2Error::kProtocol, "expected the rest of the headers");
  }
  const bool of_connection = frame.type == kSettings || frame.type == kPing || frame.type == kGoAway;
  if (frame.type <= kContinuation && frame.type != kWindowUpdate) {
    require((frame.stream == 0) == of_connection, Http2Error::kProtocol, "a frame is of a stream that cannot be, or the other way round");
  }
  switch (frame.type) {
    case kData: data_frame(frame, requests); break;
    case kHeaders:
    case kContinuation: headers_frame(frame, requests); break;
    case kPriority: require(frame.payload.size() == 5, Http2Error::kFrameSize, "PRIORITY: expected 5 bytes"); break;
    case kReset: reset_frame(frame); break;
    case kSettings: settings_frame(frame); break;
    case kPushPromise: throw Failure{Http2Error::kProtocol, "a client cannot push"};
    case kPing:
      require(frame.payload.size() == 8, Http2Error::kFrameSize, "PING: expected 8 bytes");
      if (frame.has(kAck)) break;
      append_head(8, kPing, kAck, 0, output_);
      output_.append(frame.payload.begin(), frame.payload.end());
      break;
    case kGoAway: require(frame.payload.size() >= 8, Http2Error::kFrameSize, "GOAWAY: expected at least 8 bytes"); break;
    case kWindowUpdate: window_frame(frame); break;
    default: break;  // of an extension, which has to be ignored
  }
}

void GrpcConnection::data_frame(const Frame& frame, std::vector<GrpcRequest>& requests) {
  const Bytes data = frame.unpadded();
  // A client that does not respect its window gains nothing: what it can make this side hold is limited by other means.
  received_ += frame.payload.size();
  if (received_ >= kConnectionWindow / 2) append_window(0, std::exchange(received_, 0), output_);
  Stream* const stream = find(frame.stream);
  if (stream == nullptr) return;
  if (stream->is_complete) {
    spend();
    reset(frame.stream, Http2Error::kStreamClosed);
    return;
  }
  append(frame.stream, *stream, data);
  if (!is_open(frame.stream)) return;
  stream->received += frame.payload.size();
  if (frame.has(kEndStream)) {
    complete(frame.stream, requests);
  } else if (stream->received >= kStreamWindow / 2) {
    append_window(frame.stream, std::exchange(stream->received, 0), output_);
  }
}

// Returns whether there is memory for more of a request. If not, it is refused.
bool GrpcConnection::hold(std::uint32_t id, Stream& stream, std::size_t bytes) {
  if (memory_->held + bytes > memory_->limit) {
    fail(id, GrpcStatus::kResourceExhausted, "other requests hold all memory there is for them; back off and retry");
    return false;
  }
  stream.held += bytes;
  memory_->held += bytes;
  return true;
}

// May refuse the request.
void GrpcConnection::append(std::uint32_t id, Stream& stream, Bytes data) {
  if (!hold(id, stream, data.size())) return;
  stream.body.append(data.begin(), data.end());
  if (stream.body.size() < kMessageHead) return;
  const std::size_t size = read_u32({reinterpret_cast<const std::uint8_t*>(stream.body.data()) + 1, 4});
  if (size > limits_.max_message_bytes) {
    fail(id, GrpcStatus::kResourceExhausted,
         "message: expected at most " + std::to_string(limits_.max_message_bytes) + " bytes, got " + std::to_string(size));
  } else if (stream.body.size() > kMessageHead + size) {
    fail(id, GrpcStatus::kUnimplemented, "expected one message, got more");
  }
}

// The client has sent all of a request.
void GrpcConnection::complete(std::uint32_t id, std::vector<GrpcRequest>& requests) {
  Stream& stream = streams_.at(id);
  stream.is_complete = true;
  const std::string& body = stream.body;
  if (stream.length && *stream.length != body.size()) {
    spend();
    reset(id, Http2Error::kProtocol);
  } else if (body.empty()) {
    fail(id, GrpcStatus::kUnimplemented, "expected one message, got none");
  } else if (body.size() < kMessageHead || body.size() != kMessageHead + read_u32({reinterpret_cast<const std::uint8_t*>(body.data()) + 1, 4}) ||
             static_cast<std::uint8_t>(body[0]) > 1) {
    fail(id, GrpcStatus::kInternal, "the message is not framed as gRPC says");
  } else {
    requests.push_back({id, stream.arrived, std::move(stream.path), std::move(stream.metadata), std::move(stream.body)});
  }
}

void GrpcConnection::headers_frame(const Frame& frame, std::vector<GrpcRequest>& requests) {
  Bytes part = frame.payload;
  if (frame.type == kHeaders) {
    part = frame.unpadded();
    if (frame.has(kHasPriority)) {
      if (part.size() < 5) throw Failure{Http2Error::kFrameSize, "HEADERS: too short for a priority"};
      part = part.subspan(5);
    }
    if (frame.stream % 2 == 0) throw Failure{Http2Error::kProtocol, "a client's stream has an odd number"};
    block_stream_ = frame.stream;
    block_ends_stream_ = frame.has(kEndStream);
    block_.clear();
    block_frames_ = 0;
  } else if (block_stream_ == 0) {
    throw Failure{Http2Error::kProtocol, "CONTINUATION: no headers are to be continued"};
  }
  // Each frame counts, so that empty ones come to an end too.
  block_frames_ += kFrameHead;
  block_.insert(block_.end(), part.begin(), part.end());
  if (block_.size() + block_frames_ > 4 * limits_.max_header_bytes) throw Failure{Http2Error::kEnhanceYourCalm, "headers are too long"};
  if (frame.has(kEndHeaders)) end_block(requests);
}

void GrpcConnection::end_block(std::vector<GrpcRequest>& requests) {
  const std::uint32_t id = std::exchange(block_stream_, 0);
  std::vector<HeaderField> fields;
  // Always, because the table depends on every block.
  const bool fits = decoder_.decode(block_, limits_.max_header_bytes, fields);
  if (id > last_stream_) {
    if (going_away_) return;  // the client has been told, or will be
    last_stream_ = id;
    begin_stream(id, fields, fits);
    if (block_ends_stream_ && is_open(id)) complete(id, requests);
    return;
  }
  Stream* const stream = find(id);
  if (stream == nullptr) return;
  // Trailers, which nobody asks for.
  const bool right = block_ends_stream_ && !stream->is_complete && std::ranges::all_of(fields, is_header);
  if (right) {
    complete(id, requests);
  } else {
    spend();
    reset(id, stream->is_complete ? Http2Error::kStreamClosed : Http2Error::kProtocol);
  }
}

void GrpcConnection::begin_stream(std::uint32_t id, std::vector<HeaderField>& fields, bool fits) {
  if (streams_.size() >= limits_.max_streams) {
    spend();
    reset(id, Http2Error::kRefusedStream);
    return;
  }
  Stream& stream = streams_[id];
  stream.arrived = now_;
  stream.send_window = first_send_window_;
  stream.is_complete = block_ends_stream_;
  if (!fits) {
    fail(id, GrpcStatus::kResourceExhausted, "metadata: expected at most " + std::to_string(limits_.max_header_bytes) + " bytes");
    return;
  }
  std::optional<Head> head = head_of(fields);
  if (!head) {
    spend();
    reset(id, Http2Error::kProtocol);
    return;
  }
  if (head->method != "POST" || !head->is_grpc) {
    std::string block;
    encode_field(":status", head->method != "POST" ? "405" : "415", block);
    stream.trailers = std::move(block);
    send(id, stream);
    return;
  }
  std::size_t bytes = head->path.size();
  for (const HeaderField& field : head->metadata) bytes += sizeof field + field.name.size() + field.value.size();
  if (!hold(id, stream, bytes)) return;
  stream.path = std::move(head->path);
  stream.metadata = std::move(head->metadata);
  stream.length = head->length;
}

void GrpcConnection::reset_frame(const Frame& frame) {
  if (frame.payload.size() != 4) throw Failure{Http2Error::kFrameSize, "RST_STREAM: expected 4 bytes"};
  if (frame.stream > last_stream_ && !going_away_) throw Failure{Http2Error::kProtocol, "RST_STREAM: of a stream that has not begun"};
  if (!is_open(frame.stream)) return;
  close(frame.stream);
  spend();
}

void GrpcConnection::settings_frame(const Frame& frame) {
  if (frame.payload.size() % 6 != 0 || (frame.has(kAck) && !frame.payload.empty())) {
    throw Failure{Http2Error::kFrameSize, "SETTINGS: expected 6 bytes for each"};
  }
  if (frame.has(kAck)) return;
  for (Bytes left = frame.payload; !left.empty(); left = left.subspan(6)) {
    const auto setting = static_cast<std::uint16_t>(left[0] << 8 | left[1]);
    const std::uint32_t value = read_u32(left.subspan(2));
    if (setting == kEnablePush && value > 1) throw Failure{Http2Error::kProtocol, "SETTINGS_ENABLE_PUSH: expected 0 or 1"};
    if (setting == kMaxFrameSize && (value < kMaxFrame || value > 0xffffff)) throw Failure{Http2Error::kProtocol, "SETTINGS_MAX_FRAME_SIZE"};
    if (setting != kInitialWindow) continue;  // this side neither pushes nor uses a table, and sends no longer frames
    if (value > kMaxWindow) throw Failure{Http2Error::kFlowControl, "SETTINGS_INITIAL_WINDOW_SIZE: expected at most 2^31 - 1"};
    const std::int64_t more = value - std::exchange(first_send_window_, value);
    for (auto& [_, stream] : streams_) {
      stream.send_window += more;
      if (stream.send_window > kMaxWindow) throw Failure{Http2Error::kFlowControl, "SETTINGS_INITIAL_WINDOW_SIZE: a window is too large"};
    }
  }
  append_head(0, kSettings, kAck, 0, output_);
  send_pending();
}

void GrpcConnection::window_frame(const Frame& frame) {
  if (frame.payload.size() != 4) throw Failure{Http2Error::kFrameSize, "WINDOW_UPDATE: expected 4 bytes"};
  const std::int64_t more = read_u32(frame.payload) & 0x7fffffff;
  if (frame.stream == 0) {
    if (more == 0) throw Failure{Http2Error::kProtocol, "WINDOW_UPDATE: expected more than 0"};
    send_window_ += more;
    if (send_window_ > kMaxWindow) throw Failure{Http2Error::kFlowControl, "WINDOW_UPDATE: the window is too large"};
    send_pending();
    return;
  }
  if (frame.stream > last_stream_ && !going_away_) throw Failure{Http2Error::kProtocol, "WINDOW_UPDATE: of a stream that has not begun"};
  const auto found = streams_.find(frame.stream);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  stream.send_window += more;
  if (more == 0 || stream.send_window > kMaxWindow) {
    spend();
    reset(frame.stream, more == 0 ? Http2Error::kProtocol : Http2Error::kFlowControl);
  } else if (stream.is_answered()) {
    send(frame.stream, stream);
  }
}

// The stream that a frame is for. Null if the frame is to be ignored.
GrpcConnection::Stream* GrpcConnection::find(std::uint32_t id) {
  const auto found = streams_.find(id);
  if (found != streams_.end()) return &found->second;
  if (id > last_stream_) {
    if (!going_away_) throw Failure{Http2Error::kProtocol, "a frame of a stream that has not begun"};
    return nullptr;
  }
  if (std::ranges::find(cut_, id) == cut_.end()) throw Failure{Http2Error::kStreamClosed, "a frame of a stream that has ended"};
  return nullptr;
}

void GrpcConnection::close(std::uint32_t id) {
  const auto found = streams_.find(id);
  memory_->held -= found->second.held;
  streams_.erase(found);
}

void GrpcConnection::reset(std::uint32_t id, Http2Error error) {
  if (is_open(id)) close(id);
  cut_.push_back(id);
  if (cut_.size() > kKeptCuts) cut_.pop_front();
  append_head(4, kReset, 0, id, output_);
  append_u32(static_cast<std::uint32_t>(error), output_);
}

void GrpcConnection::spend() {
  if (--allowed_resets_ < 0) throw Failure{Http2Error::kEnhanceYourCalm, "too many calls are given up or begun wrongly"};
}

// Answers

void GrpcConnection::answer(std::uint32_t stream, std::string_view message) {
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second.is_answered()) return;
  static const std::string kBlock = answer_block(), kTrailers = trailers(GrpcStatus{0}, "");
  append_headers(stream, kBlock, false);
  Stream& answered = found->second;
  answered.data.reserve(kMessageHead + message.size());
  answered.data.push_back('\0');
  append_u32(static_cast<std::uint32_t>(message.size()), answered.data);
  answered.data.append(message);
  answered.trailers = kTrailers;
  send(stream, answered);
}

void GrpcConnection::fail(std::uint32_t stream, GrpcStatus status, std::string_view text) {
  const auto found = streams_.find(stream);
  if (found == streams_.end() || found->second.is_answered()) return;
  found->second.trailers = answer_block() + trailers(status, text);
  send(stream, found->second);
}

// Sends as much of an answer as the client's windows allow, and closes the stream at its end.
void GrpcConnection::send(std::uint32_t id, Stream& stream) {
  while (stream.sent < stream.data.size()) {
    const std::int64_t window = std::min(send_window_, stream.send_window);
    if (window <= 0) return;
    const std::size_t size = std::min({kMaxFrame, static_cast<std::size_t>(window), stream.data.size() - stream.sent});
    append_head(size, kData, 0, id, output_);
    output_.append(stream.data, stream.sent, size);
    stream.sent += size;
    send_window_ -= static_cast<std::int64_t>(size);
    stream.send_window -= static_cast<std::int64_t>(size);
    moved_at_ = now_;
  }
  append_headers(id, stream.trailers, true);
  moved_at_ = now_;
  if (stream.is_complete) {
    allowed_resets_ = std::min(allowed_resets_ + 1, kResets);
    close(id);
  } else {
    reset(id, Http2Error::kNone);  // the rest of the request is not needed
  }
}

void GrpcConnection::send_pending() {
  for (auto at = streams_.begin(); at != streams_.end() && send_window_ > 0;) {
    const auto here = at++;  // which may be closed
    if (here->second.is_answered()) send(here->first, here->second);
  }
}

void GrpcConnection::append_headers(std::uint32_t id, std::string_view block, bool is_last) {
  // The first block says that this side uses no table, so a client that allows a smaller one later needs no answer.
  const std::string_view resize = std::exchange(has_encoded_, true) ? "" : "\x20";
  append_head(resize.size() + block.size(), kHeaders, is_last ? kEndHeaders | kEndStream : kEndHeaders, id, output_);
  output_.append(resize).append(block);
}

// The end

void GrpcConnection::expire(double now) {
  if (over_) return;
  now_ = now;
  const bool is_partial = !has_settings_ || !partial_.empty() || block_stream_ != 0;
  const bool is_stalled = std::ranges::any_of(streams_, [](const auto& one) { return one.second.is_answered(); });
  if (is_partial && now - whole_since_ > limits_.frame_secs) return end(Http2Error::kEnhanceYourCalm, "a frame takes too long");
  if (is_stalled && now - moved_at_ > limits_.stall_secs) return end(Http2Error::kEnhanceYourCalm, "answers are not taken");
  if (!is_partial && streams_.empty() && now - std::max(heard_at_, moved_at_) > limits_.idle_secs) return go_away();
  for (auto at = streams_.begin(); at != streams_.end();) {
    const auto& [id, stream] = *at++;  // which may be closed
    if (!stream.is_complete && now - stream.arrived > limits_.request_secs) {
      fail(id, GrpcStatus::kDeadlineExceeded, "the deadline of the request was exceeded before all of it had come");
    }
  }
}

void GrpcConnection::go_away() {
  if (going_away_ || over_) return;
  going_away_ = true;
  append_head(8, kGoAway, 0, 0, output_);
  append_u32(last_stream_, output_);
  append_u32(static_cast<std::uint32_t>(Http2Error::kNone), output_);
}

void GrpcConnection::end(Http2Error error, std::string_view text) {
  over_ = true;
  while (!streams_.empty()) close(streams_.begin()->first);
  partial_ = {};
  append_head(8 + text.size(), kGoAway, 0, 0, output_);
  append_u32(last_stream_, output_);
  append_u32(static_cast<std::uint32_t>(error), output_);
  output_.append(text);
}

}  // namespace monolith
