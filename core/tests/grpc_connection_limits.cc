// Danger: a client that makes the server hold memory, or work for it, by what it never finishes, never reads or gives up at once.
#include <string>

#include "check.h"
#include "http2_client.h"
#include "monolith/grpc_connection.h"

namespace {

using namespace http2;
using monolith::GrpcLimits;

const std::string kHead = block(usual_fields());

std::string headers(std::uint32_t stream) { return frame(kHeaders, kEndHeaders, stream, kHead); }

}  // namespace

TEST("a message that is too long is refused by its length alone") {
  GrpcLimits limits;
  limits.max_message_bytes = 10;
  Client client(limits);
  client.open();
  CHECK_EQ(client.send(call(1, std::string(10, 'm'))).size(), 1u);
  client.send(headers(3) + frame(kData, 0, 3, framed(std::string(11, 'm')).substr(0, 5)));
  CHECK_EQ(client.received(), "headers 3 end :status=200 grpc-status=8 grpc-message=message: expected at most 10 bytes, got 11\nreset 3 0\n");
}

TEST("requests of all connections hold no more memory together than there is") {
  Client client({}, 2000);
  client.open();
  client.send(headers(1) + frame(kData, 0, 1, framed(std::string(1500, 'm')).substr(0, 1000)));
  CHECK(client.held() > 1000);
  client.send(headers(3) + frame(kData, 0, 3, framed(std::string(1500, 'm')).substr(0, 1000)));
  CHECK(client.received().starts_with("headers 3 end :status=200 grpc-status=8 grpc-message=other requests hold all memory"));
  CHECK(client.held() > 1000 && client.held() < 2000);
  CHECK(client.server.is_open(1));
}

TEST("metadata that is too long is refused, and later calls are read") {
  GrpcLimits limits;
  limits.max_header_bytes = 1000;
  Client client(limits);
  client.open();
  auto fields = usual_fields();
  fields.push_back({"long", std::string(1000, 'v')});
  client.send(frame(kHeaders, kEndHeaders, 1, block(fields)));
  CHECK_EQ(client.received(), "headers 1 end :status=200 grpc-status=8 grpc-message=metadata: expected at most 1000 bytes\nreset 1 0\n");
  CHECK_EQ(client.send(call(3, "")).size(), 1u);
}

TEST("headers without an end are refused, also empty ones") {
  for (const std::size_t size : {0u, 1000u}) {
    Client client;
    client.open();
    client.send(frame(kHeaders, 0, 1, kHead));
    int sent = 0;
    while (!client.server.has_failed() && ++sent < 100'000) client.send(frame(kContinuation, 0, 1, std::string(size, '\x82')));
    CHECK(sent < 8000);
    CHECK_EQ(client.received(), "goaway 0 11\n");
  }
}

TEST("calls beyond the limit are refused unread, as calls that may be repeated") {
  GrpcLimits limits;
  limits.max_streams = 2;
  Client client(limits);
  client.open();
  CHECK_EQ(client.send(call(1, "") + call(3, "") + call(5, "")).size(), 2u);
  CHECK_EQ(client.received(), "reset 5 7\n");
  client.server.answer(1, "");
  client.received();
  CHECK_EQ(client.send(call(7, "")).size(), 1u);
}

TEST("a client that gives up one call after the other is refused, unless it lets as many be answered") {
  Client client, fair;
  client.open();
  fair.open();
  std::uint32_t stream = 1;
  for (int i = 0; i < 5000; ++i, stream += 2) client.send(headers(stream) + frame(kReset, 0, stream, u32(8)));
  CHECK_EQ(client.received(), "goaway 1025 11\n");
  CHECK(client.server.is_over());
  stream = 1;
  for (int i = 0; i < 5000; ++i, stream += 4) {
    fair.send(headers(stream) + frame(kReset, 0, stream, u32(8)) + call(stream + 2, ""));
    fair.server.answer(stream + 2, "");
    fair.server.take_output();
  }
  CHECK(!fair.server.is_over());
}

TEST("a client that makes the server reset one call after the other is refused too") {
  for (const std::string& fault : {frame(kWindowUpdate, 0, 0, u32(0)), frame(kData, kEndStream, 0, framed("more"))}) {
    Client client;
    client.open();
    for (std::uint32_t stream = 1; stream < 5000 && !client.server.is_over(); stream += 2) {
      std::string of_stream = fault;
      of_stream.replace(5, 4, u32(stream));
      client.send(call(stream, "") + of_stream);
    }
    CHECK(client.server.has_failed());
  }
}

TEST("a request that does not come to its end is answered when it has taken too long") {
  GrpcLimits limits;
  limits.request_secs = 10;
  Client client(limits);
  client.open();
  client.send(headers(1), 5);
  client.send(call(3, "whole"), 5);
  client.server.expire(14);
  CHECK_EQ(client.received(), "");
  client.server.expire(15.5);
  CHECK_EQ(client.received(), "headers 1 end :status=200 grpc-status=4 "
                              "grpc-message=the deadline of the request was exceeded before all of it had come\nreset 1 0\n");
  CHECK(client.server.is_open(3));
}

TEST("half a frame, half of the headers and no preface end the connection in time") {
  for (const std::string& sent : {kPreface.substr(0, 5), kPreface, kPreface + frame(kSettings, 0, 0) + "\1\1", kPreface + frame(kSettings, 0, 0) + frame(kHeaders, 0, 1, kHead)}) {
    Client client;
    client.send(sent);
    client.server.take_output();
    client.server.expire(29);
    CHECK(!client.server.is_over());
    client.send(sent.ends_with(kHead) ? frame(kContinuation, 0, 1) : "", 29);  // nothing that would end it
    client.server.expire(31);
    CHECK_EQ(client.received(), "goaway 0 11\n");
  }
}

TEST("a frame has all of its time after a long silence") {
  Client client;
  client.open();
  client.send(call(1, ""), 1000);
  client.send("\1\1", 2000);
  client.server.expire(2029);
  CHECK(!client.server.is_over());
  client.server.expire(2031);
  CHECK(client.server.has_failed());
}

TEST("a client that does not take its answer is given up, one that takes a little is not") {
  Client client;
  client.open(setting(4, 10));
  client.send(call(1, ""));
  client.server.answer(1, std::string(100, 'a'));
  client.server.expire(70);
  client.send(frame(kWindowUpdate, 0, 1, u32(1)), 70);
  client.server.expire(140);
  CHECK(!client.server.is_over());
  client.send(frame(kPing, 0, 0, "12345678"), 140);
  client.server.expire(150);
  CHECK(client.server.has_failed());
}

TEST("an idle connection is closed as a client expects it, one with a call is not") {
  GrpcLimits limits;
  limits.idle_secs = 100;
  Client idle(limits), busy(limits);
  idle.open();
  busy.open();
  busy.send(call(1, ""));
  idle.server.expire(99), busy.server.expire(101);
  CHECK_EQ(idle.received() + busy.received(), "");
  idle.server.expire(101);
  CHECK_EQ(idle.received(), "goaway 0 0\n");
  CHECK(idle.server.is_over());
  CHECK(!idle.server.has_failed());
}

TEST("a connection that is lost frees what its requests held") {
  auto memory = std::make_shared<monolith::GrpcMemory>(monolith::GrpcMemory{.limit = 1 << 20});
  {
    monolith::GrpcConnection connection({}, memory, 0);
    const std::string sent = kPreface + frame(kSettings, 0, 0) + call(1, "message");
    CHECK_EQ(connection.receive({reinterpret_cast<const std::uint8_t*>(sent.data()), sent.size()}, 0).size(), 1u);
    CHECK(memory->held > 0);
  }
  CHECK_EQ(memory->held, 0u);
}
