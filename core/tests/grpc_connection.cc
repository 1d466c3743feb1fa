// Danger: a call that is answered with another call's message, not at all, or with more than its client has allowed to be sent.
#include "monolith/grpc_connection.h"

#include <string>

#include "check.h"
#include "http2_client.h"

namespace {

using namespace http2;
using monolith::GrpcLimits;
using monolith::GrpcStatus;

const std::string kOk = " end grpc-status=0\n";

std::string answered(std::uint32_t stream, std::size_t bytes) {
  const std::string id = std::to_string(stream);
  return "headers " + id + " :status=200\ndata " + id + " " + std::to_string(bytes) + "\nheaders " + id + kOk;
}

}  // namespace

TEST("a call is handed out with its path, metadata and message, and answered with a message and a status") {
  Client client;
  CHECK(client.send(kPreface.substr(0, 10)).empty());
  CHECK(client.send(kPreface.substr(10) + frame(kSettings, 0, 0)).empty());
  CHECK_EQ(client.received(), "settings\nwindow 0 4128769\nsettings ack\n");
  auto fields = usual_fields();
  fields.push_back({"a-name", "a value"});
  CHECK(client.send(frame(kHeaders, kEndHeaders, 1, block(fields)), 2).empty());
  const auto requests = client.send(frame(kData, kEndStream, 1, framed("hello")), 3);
  REQUIRE(requests.size() == 1);
  CHECK_EQ(requests[0].stream, 1u);
  CHECK_EQ(requests[0].arrived, 2.0);
  CHECK_EQ(requests[0].path, "/s/m");
  CHECK_EQ(requests[0].message(), "hello");
  CHECK(!requests[0].is_compressed());
  CHECK_EQ(block(requests[0].metadata), block({{"content-type", "application/grpc"}, {"te", "trailers"}, {"a-name", "a value"}}));
  CHECK(client.server.is_open(1));
  client.server.answer(1, "the answer");
  CHECK_EQ(client.received(), answered(1, 15));
  CHECK_EQ(client.body, framed("the answer"));
  CHECK(!client.server.is_open(1));
  CHECK_EQ(client.held(), 0u);
  client.server.answer(1, "again");
  client.server.fail(7, GrpcStatus::kInternal, "never begun");
  CHECK_EQ(client.received(), "");
}

TEST("calls are found however the bytes are cut") {
  std::string bytes = kPreface + frame(kSettings, 0, 0);
  for (std::uint32_t stream = 1; stream < 9; stream += 2) bytes += call(stream, "message " + std::to_string(stream));
  for (std::size_t step = 1; step < 40; ++step) {
    Client client;
    std::string found;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
      for (const auto& request : client.send(bytes.substr(at, step))) found += std::string(request.message()) + ";";
    }
    CHECK_EQ(found, "message 1;message 3;message 5;message 7;");
  }
}

TEST("a message may come in several frames, headers too, both padded") {
  Client client;
  client.open();
  const std::string head = block(usual_fields());
  client.send(frame(kHeaders, kPadded | kHasPriority, 1, std::string("\3\0\0\0\0\0", 6) + head.substr(0, 7) + std::string(3, '\0')));
  client.send(frame(kContinuation, 0, 1, head.substr(7, 20)));
  client.send(frame(kContinuation, kEndHeaders, 1, head.substr(27)));
  client.send(frame(kData, 0, 1, framed("hello").substr(0, 3)));
  client.send(frame(kData, kPadded, 1, "\2" + framed("hello").substr(3, 4) + std::string(2, '\0')));
  const auto requests = client.send(frame(kData, kEndStream, 1, framed("hello").substr(7)));
  REQUIRE(requests.size() == 1);
  CHECK_EQ(requests[0].message(), "hello");
  CHECK_EQ(requests[0].path, "/s/m");
}

TEST("a failure has its number and its text, of which nothing can break the headers") {
  Client client;
  client.open();
  client.send(call(1, ""));
  client.server.fail(1, GrpcStatus{5}, "a\r\nb: 100% \xc3\xa4");
  CHECK_EQ(client.received(), "headers 1 end :status=200 grpc-status=5 grpc-message=a%0D%0Ab: 100%25 %C3%A4\n");
  client.send(call(3, ""));
  client.server.fail(3, GrpcStatus{5}, std::string(100'000, 'x'));
  CHECK_EQ(client.received(), "headers 3 end :status=200 grpc-status=5 grpc-message=" + std::string(1024, 'x') + "\n");
}

TEST("no more is sent than the windows of the call and of the connection allow") {
  Client client;
  client.open(setting(4, 100));
  client.send(call(1, "") + call(3, ""));
  client.server.answer(1, std::string(200, 'a'));
  client.server.answer(3, std::string(40, 'b'));
  CHECK_EQ(client.received(), "headers 1 :status=200\ndata 1 100\n" + answered(3, 45));
  client.send(frame(kWindowUpdate, 0, 1, u32(5)));
  CHECK_EQ(client.received(), "data 1 5\n");
  client.send(frame(kSettings, 0, 0, setting(4, 60)));  // 45 less than nothing
  client.send(frame(kWindowUpdate, 0, 1, u32(40)));
  CHECK_EQ(client.received(), "settings ack\n");
  client.send(frame(kSettings, 0, 0, setting(4, 70'000)));
  CHECK_EQ(client.received(), "settings ack\ndata 1 100\nheaders 1" + kOk);
  CHECK_EQ(client.body, framed(std::string(200, 'a')).substr(0, 100) + framed(std::string(40, 'b')) + std::string(105, 'a'));

  // Of the connection 65,535 less 250 are left.
  client.send(call(5, ""));
  client.server.answer(5, std::string(65'500, 'c'));
  CHECK_EQ(client.received(), "headers 5 :status=200\ndata 5 16384\ndata 5 16384\ndata 5 16384\ndata 5 16133\n");
  client.send(frame(kWindowUpdate, 0, 0, u32(1000)));
  CHECK_EQ(client.received(), "data 5 220\nheaders 5" + kOk);
}

TEST("a client may send a message that is larger than its window, bit by bit") {
  GrpcLimits limits;
  Client client(limits, 1 << 24);
  client.open();
  const std::string message = framed(std::string(5'000'000, 'm'));
  client.send(frame(kHeaders, kEndHeaders, 1, block(usual_fields())));
  std::int64_t stream_window = 1 << 20, window = 1 << 22;
  for (std::size_t at = 0; at < message.size(); at += 16384) {
    const std::string part = message.substr(at, 16384);
    const bool is_last = at + part.size() == message.size();
    const auto found = client.send(frame(kData, is_last ? kEndStream : 0, 1, part));
    CHECK_EQ(found.size(), is_last ? 1u : 0u);
    stream_window -= static_cast<std::int64_t>(part.size()), window -= static_cast<std::int64_t>(part.size());
    for (const Sent& sent : frames(client.server.take_output())) {
      CHECK_EQ(int{sent.type}, int{kWindowUpdate});
      (sent.stream == 0 ? window : stream_window) += number(sent.payload);
    }
    CHECK(stream_window > 0 && window > 0);
  }
  CHECK(client.held() >= message.size());
  client.server.answer(1, "");
  CHECK_EQ(client.held(), 0u);
}

TEST("what is no call of gRPC is refused in words of HTTP, and one without a whole message in those of gRPC") {
  Client client;
  client.open();
  auto fields = usual_fields();
  fields[0].value = "GET";
  client.send(frame(kHeaders, kEndHeaders | kEndStream, 1, block(fields)));
  CHECK_EQ(client.received(), "headers 1 end :status=405\n");
  fields = usual_fields();
  fields[4].value = "application/grpcx";
  client.send(frame(kHeaders, kEndHeaders, 3, block(fields)));
  CHECK_EQ(client.received(), "headers 3 end :status=415\nreset 3 0\n");
  client.send(frame(kData, kEndStream, 3, framed("in transit")));
  client.send(frame(kHeaders, kEndHeaders | kEndStream, 5, block(usual_fields())));
  CHECK_EQ(client.received(), "headers 5 end :status=200 grpc-status=12 grpc-message=expected one message, got none\n");
  for (const std::string& body : {std::string("\0\0\0", 3), framed("short").substr(0, 8), "\2" + framed("flag").substr(1)}) {
    static std::uint32_t stream = 7;
    CHECK(client.send(frame(kHeaders, kEndHeaders, stream, block(usual_fields())) + frame(kData, kEndStream, stream, body)).empty());
    CHECK_EQ(client.received(), "headers " + std::to_string(stream) + " end :status=200 grpc-status=13 grpc-message=the message is not framed as gRPC says\n");
    stream += 2;
  }
  client.send(frame(kHeaders, kEndHeaders, 15, block(usual_fields())) + frame(kData, 0, 15, framed("one") + framed("two")));
  CHECK_EQ(client.received(), "headers 15 end :status=200 grpc-status=12 grpc-message=expected one message, got more\nreset 15 0\n");
  CHECK_EQ(client.server.open_streams(), 0u);
  CHECK_EQ(client.held(), 0u);
}

TEST("trailers end a request") {
  Client client;
  client.open();
  client.send(frame(kHeaders, kEndHeaders, 1, block(usual_fields())) + frame(kData, 0, 1, framed("m")));
  const auto requests = client.send(frame(kHeaders, kEndHeaders | kEndStream, 1, block({{"a", "b"}})));
  REQUIRE(requests.size() == 1);
  CHECK_EQ(requests[0].message(), "m");
}

TEST("a call that is given up needs no answer, and its memory is free") {
  Client client;
  client.open();
  client.send(call(1, "message"));
  CHECK(client.held() > 0);
  client.send(frame(kReset, 0, 1, u32(8)));
  CHECK(!client.server.is_open(1));
  CHECK_EQ(client.held(), 0u);
  client.server.answer(1, "late");
  CHECK_EQ(client.received(), "");
}

TEST("after going away, calls that have begun are finished, and others are left to another server") {
  Client client;
  client.open();
  client.send(frame(kHeaders, kEndHeaders, 1, block(usual_fields())));
  client.server.go_away();
  client.server.go_away();
  CHECK_EQ(client.received(), "goaway 1 0\n");
  CHECK(!client.server.is_over());
  CHECK(client.send(call(3, "too late") + frame(kReset, 0, 3, u32(8)) + frame(kWindowUpdate, 0, 3, u32(8))).empty());
  CHECK_EQ(client.send(frame(kData, kEndStream, 1, framed("in time"))).size(), 1u);
  client.server.answer(1, "");
  CHECK_EQ(client.received(), answered(1, 5));
  CHECK(client.server.is_over());
  CHECK(!client.server.has_failed());
}

TEST("pings are answered, unknown frames and settings are not") {
  Client client;
  client.open();
  client.send(frame(kPing, 0, 0, "12345678") + frame(kPing, kAck, 0, "87654321") + frame(0xfe, 0xff, 5, "?") + frame(kSettings, 0, 0, setting(0x77, 1)) +
              frame(kPriority, 0, 9, std::string(5, '\0')) + frame(kGoAway, 0, 0, std::string(8, '\0')) + frame(kSettings, kAck, 0));
  CHECK_EQ(client.received(), "ping 12345678\nsettings ack\n");
  CHECK_EQ(client.send(call(1, "still served")).size(), 1u);
}
