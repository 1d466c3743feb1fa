// Danger: frames that no client should send: each is answered with the error that RFC 9113 names, and nothing of them is believed.
#include <random>
#include <string>

#include "check.h"
#include "http2_client.h"
#include "monolith/grpc_connection.h"

namespace {

using namespace http2;

const std::string kHead = block(usual_fields());

// What the server says to a client that has made one call, on stream 1, which is not answered.
std::string said_to(const std::string& bytes) {
  Client client;
  client.open();
  client.send(call(1, "first"));
  CHECK(client.send(bytes).empty());
  return client.received();
}

std::string request_with(const std::vector<monolith::HeaderField>& more, std::size_t left_out = 99) {
  auto fields = usual_fields();
  if (left_out < fields.size()) fields.erase(fields.begin() + static_cast<std::ptrdiff_t>(left_out));
  fields.insert(fields.end(), more.begin(), more.end());
  return frame(kHeaders, kEndHeaders, 3, block(fields)) + frame(kData, kEndStream, 3, framed(""));
}

}  // namespace

TEST("what breaks the connection ends it") {
  constexpr int kProtocol = 1, kFlow = 3, kClosed = 5, kSize = 6, kCompression = 9;
  const struct {
    int error;
    std::string bytes;
  } cases[] = {
      {kSize, std::string("\0\x40\1\0\0\0\0\0\1", 9)},                                   // a frame of 16,385 bytes
      {kProtocol, frame(kData, 0, 0, "x")},                                               // data of the connection
      {kProtocol, frame(kData, 0, 3, "x")},                                               // of a stream that has not begun
      {kProtocol, frame(kData, kPadded, 1, "\1")},                                        // more padding than bytes
      {kProtocol, frame(kHeaders, kEndHeaders, 0, kHead)},                                // a request of the connection
      {kProtocol, frame(kHeaders, kEndHeaders, 2, kHead)},                                // of a server's stream
      {kProtocol, frame(kHeaders, kPadded | kEndHeaders, 3, "\6" + kHead.substr(0, 5))},  // nothing but padding
      {kSize, frame(kHeaders, kHasPriority | kEndHeaders, 3, "1234")},                    // too short for its priority
      {kProtocol, frame(kHeaders, 0, 3, kHead) + frame(kPing, 0, 0, "12345678")},         // something within headers
      {kProtocol, frame(kHeaders, 0, 3, kHead) + frame(kContinuation, kEndHeaders, 5)},   // the rest of another stream's
      {kProtocol, frame(kContinuation, kEndHeaders, 1)},                                  // the rest of nothing
      {kCompression, frame(kHeaders, kEndHeaders, 3, "\xff")},                            // headers cut off
      {kSize, frame(kPriority, 0, 1, "1234")},
      {kProtocol, frame(kPriority, 0, 0, "12345")},
      {kSize, frame(kReset, 0, 1, "123")},
      {kProtocol, frame(kReset, 0, 0, "1234")},
      {kProtocol, frame(kReset, 0, 3, "1234")},
      {kSize, frame(kSettings, 0, 0, "12345")},
      {kSize, frame(kSettings, kAck, 0, setting(3, 1))},
      {kProtocol, frame(kSettings, 0, 1)},
      {kProtocol, frame(kSettings, 0, 0, setting(2, 2))},
      {kFlow, frame(kSettings, 0, 0, setting(4, 0x80000000))},
      {kProtocol, frame(kSettings, 0, 0, setting(5, 16383))},
      {kProtocol, frame(kSettings, 0, 0, setting(5, 1 << 24))},
      {kProtocol, frame(kPushPromise, kEndHeaders, 1, kHead)},
      {kSize, frame(kPing, 0, 0, "1234567")},
      {kProtocol, frame(kPing, 0, 1, "12345678")},
      {kSize, frame(kGoAway, 0, 0, "1234567")},
      {kProtocol, frame(kGoAway, 0, 1, "12345678")},
      {kSize, frame(kWindowUpdate, 0, 0, "123")},
      {kProtocol, frame(kWindowUpdate, 0, 0, u32(0))},
      {kFlow, frame(kWindowUpdate, 0, 0, u32(0x7fffffff))},
      {kProtocol, frame(kWindowUpdate, 0, 3, u32(1))},
      {kFlow, frame(kWindowUpdate, 0, 1, u32(0x7fff0000)) + frame(kSettings, 0, 0, setting(4, 0x7fffffff))},
      {kClosed, frame(kReset, 0, 1, u32(8)) + frame(kData, 0, 1, "x")},                    // of a stream that the client has ended
      {kClosed, frame(kReset, 0, 1, u32(8)) + frame(kHeaders, kEndHeaders, 1, kHead)},
  };
  for (const auto& [error, bytes] : cases) {
    Client client;
    client.open();
    client.send(call(1, "first"));
    client.send(bytes);
    const std::string said = client.received();
    const std::string expected = "goaway 1 " + std::to_string(error) + "\n";
    CHECK_EQ(said.substr(said.rfind("goaway") == std::string::npos ? 0 : said.rfind("goaway")), expected);
    CHECK(client.server.has_failed());
    CHECK_EQ(client.held(), 0u);
    CHECK(client.send(call(5, "ignored")).empty());
  }
}

TEST("settings come first, after the preface, which is HTTP/2") {
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n"), kPreface + frame(kPing, 0, 0, "12345678"), kPreface + frame(kSettings, kAck, 0)}) {
    Client client;
    client.send(bytes);
    CHECK_EQ(client.received(), "settings\nwindow 0 4128769\ngoaway 0 1\n");
  }
}

TEST("what breaks one stream ends that one") {
  CHECK_EQ(said_to(frame(kData, 0, 1, "x")), "reset 1 5\n");                                       // after its end
  CHECK_EQ(said_to(frame(kHeaders, kEndHeaders | kEndStream, 1, block({{"a", "b"}}))), "reset 1 5\n");
  CHECK_EQ(said_to(frame(kWindowUpdate, 0, 1, u32(0))), "reset 1 1\n");
  CHECK_EQ(said_to(frame(kWindowUpdate, 0, 1, u32(0x7fffffff))), "reset 1 3\n");
  const std::string head = frame(kHeaders, kEndHeaders, 3, kHead);
  CHECK_EQ(said_to(head + frame(kHeaders, kEndHeaders, 3, block({{"a", "b"}}))), "reset 3 1\n");  // trailers that are not the end
  CHECK_EQ(said_to(head + frame(kHeaders, kEndHeaders | kEndStream, 3, block({{":path", "/"}}))), "reset 3 1\n");
}

TEST("headers that are no request reset the stream") {
  const std::string reset = "reset 3 1\n";
  for (std::size_t left_out : {0u, 1u, 2u}) CHECK_EQ(said_to(request_with({}, left_out)), reset);
  CHECK_EQ(said_to(request_with({{":path", "/again"}})), reset);
  CHECK_EQ(said_to(request_with({{":status", "200"}})), reset);
  CHECK_EQ(said_to(request_with({{"Upper", "case"}})), reset);
  CHECK_EQ(said_to(request_with({{"", "no name"}})), reset);
  CHECK_EQ(said_to(request_with({{"a b", "blank"}})), reset);
  CHECK_EQ(said_to(request_with({{"a", "line\nend"}})), reset);
  CHECK_EQ(said_to(request_with({{"a", std::string("\0", 1)}})), reset);
  CHECK_EQ(said_to(request_with({{"a", " blank"}})), reset);
  CHECK_EQ(said_to(request_with({{"a", "blank\t"}})), reset);
  for (const char* name : {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"}) {
    CHECK_EQ(said_to(request_with({{name, "x"}})), reset);
  }
  CHECK_EQ(said_to(request_with({{"te", "gzip"}})), reset);
  CHECK_EQ(said_to(request_with({{"content-length", "4"}})), reset);
  CHECK_EQ(said_to(request_with({{"content-length", "5"}, {"content-length", "6"}})), reset);
  CHECK_EQ(said_to(request_with({{"content-length", "-5"}})), reset);
  CHECK_EQ(said_to(frame(kHeaders, kEndHeaders, 3, block({{"a", "b"}}) + kHead) + frame(kData, kEndStream, 3, framed(""))), reset);
  CHECK_EQ(said_to(frame(kHeaders, kEndHeaders, 3, block({{":path", ""}}))), reset);
}

TEST("random changes of good frames break no promise") {
  std::string good = kPreface + frame(kSettings, 0, 0, setting(4, 50)) + call(1, "one") + frame(kWindowUpdate, 0, 0, u32(9)) +
                     frame(kHeaders, 0, 3, kHead.substr(0, 9)) + frame(kContinuation, kEndHeaders, 3, kHead.substr(9)) +
                     frame(kData, kEndStream | kPadded, 3, "\1" + framed("two") + "x") + frame(kReset, 0, 1, u32(8)) + call(5, "three");
  std::mt19937 random(7);
  for (int turn = 0; turn < 20'000; ++turn) {
    std::string bytes = good;
    for (unsigned changes = random() % 4; changes > 0; --changes) bytes[random() % bytes.size()] = static_cast<char>(random());
    monolith::GrpcLimits limits;
    limits.max_streams = 2;
    Client client(limits, 600);
    const std::size_t cut = random() % bytes.size();
    for (const std::string& part : {bytes.substr(0, cut), bytes.substr(cut)}) {
      for (const auto& request : client.send(part)) {
        REQUIRE(request.framed.size() >= 5 && client.server.is_open(request.stream));
        client.server.answer(request.stream, std::string(random() % 80, 'a'));
      }
      CHECK(client.server.open_streams() <= 2 && client.held() <= 600);
    }
    client.server.expire(1000);
    client.received();  // which throws if a frame is cut
    CHECK(!client.server.has_failed() || client.held() == 0);
  }
}
