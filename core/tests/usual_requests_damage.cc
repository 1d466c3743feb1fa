// Danger: a request whose bytes differ from those of a good one at one place is read as something that it does not say: a length that
// lies moves the next request into this one (request smuggling), and an id that is misread is answered for somebody else. Whatever is
// found is written out again here, and has to be the request that came.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "hand_written_message.h"
#include "monolith/http_request.h"
#include "monolith/infer_request.h"

namespace {

using namespace monolith;

// A copy of exactly its size lets the address sanitizer see a read outside.
Bytes exact(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

std::string without_blanks(std::string text) {
  std::erase_if(text, [](char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; });
  return text;
}

// Calls check(text) for `text` with any byte in the place of each of its bytes, before it, and with one byte less.
template <typename Check>
void with_each_change(const std::string& text, const Check& check) {
  for (std::size_t at = 0; at < text.size(); ++at) {
    check(text.substr(0, at) + text.substr(at + 1));
    for (int byte = 0; byte < 256; ++byte) {
      const std::string with(1, static_cast<char>(byte));
      check(text.substr(0, at) + with + text.substr(at + 1));
      check(text.substr(0, at) + with + text.substr(at));
    }
  }
}

constexpr const char* kHeads[] = {"Host", "Content-Length", "Accept"};

std::string post_of(const std::string& length, const std::string& body) {
  return "POST /v2/m HTTP/1.1\r\nHost: a\r\nContent-Length: " + length + "\r\nAccept: */*\r\n\r\n" + body;
}

std::string written(const HttpPost& post, const std::string& whole) {
  std::string text = "POST " + std::string(post.url) + " HTTP/1.1\r\n";
  for (const auto& [name, value] : post.headers) text.append(name).append(": ").append(value).append("\r\n");
  return text + "\r\n" + whole.substr(post.body);
}

// As JSON, in the order of fields that the requests here have. `tensors`: ids are not in it.
std::string written(const InferRequest& request, bool tensors) {
  std::string text = R"({"id":")" + std::string(request.id) + R"(","inputs":[)";
  const std::string rows = std::to_string(request.rows);
  for (std::size_t i = 0; i < request.names.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::string(R"({"name":")") + std::string(request.names[i]) + R"(","datatype":"INT64","shape":[)" + rows;
    if (tensors) {
      text += R"(],"parameters":{"binary_data_size":)" + std::to_string(8 * request.rows) + "}}";
      continue;
    }
    text += R"(],"data":[)";
    for (std::size_t r = 0; r < request.rows; ++r) text += (r == 0 ? "" : ",") + std::to_string(request.ids[i * request.rows + r]);
    text += "]}";
  }
  text += R"(],"parameters":{"timeout":)" + std::to_string(request.timeout.value_or(0)) + R"(,"route_key":")";
  return without_blanks(text + std::string(request.route_key.value_or("")) + R"("}})");
}

Bytes input_of(std::string_view name, std::size_t rows, const Bytes& ids, bool raw) {
  Message input = Message().text(1, std::string(name)).text(2, "INT64").number(3, rows);
  return raw ? input.bytes : input.data(5, Message().data(3, ids).bytes).bytes;
}

// As a message, in the order of fields that the messages here have.
Bytes written(const InferRequest& request) {
  Message all;
  std::uint32_t field = 0;
  for (const std::string_view text : {request.model, request.version, request.id}) {
    if (++field; !text.empty()) all.text(field, std::string(text));
  }
  const std::int64_t* ids = request.ids.data();
  for (const std::string_view name : request.names) {
    Message packed;
    for (std::size_t r = 0; r < request.rows && !request.raw; ++r) packed.varint(static_cast<std::uint64_t>(*ids++));
    all.data(5, input_of(name, request.rows, packed.bytes, request.raw));
  }
  for (std::size_t i = 0; i < request.names.size() && request.raw; ++i, ids += request.rows) {
    Bytes raw(8 * request.rows);
    std::memcpy(raw.data(), ids, raw.size());
    all.data(7, raw);
  }
  return all.bytes;
}

InferRequest sample(bool raw) {
  InferRequest request;
  request.model = "m", request.version = "3", request.id = "r", request.raw = raw;
  request.names = {"a", "bc"}, request.rows = 2;
  // Numbers of one byte in a message: longer ones can be written in several ways.
  request.ids = raw ? std::vector<std::int64_t>{1, -2, 3, 9223372036854775807} : std::vector<std::int64_t>{1, 44, 3, 100};
  request.timeout = 70, request.route_key = "k";
  return request;
}

}  // namespace

TEST("a POST of which one byte is different is declined, or is what it says") {
  const std::string good = post_of("4", "body");
  std::size_t taken = 0;
  const auto check = [&](const std::string& text) {
    const Bytes whole = exact(text);
    const auto found = read_post(whole);
    if (!found) return;
    ++taken;
    CHECK_EQ(written(*found, text), text);
    std::size_t lengths = 0;
    for (const auto& [name, value] : found->headers) {
      if (std::string_view(name).size() != std::strlen(kHeads[1]) || (name[0] | 0x20) != 'c' || (name[8] | 0x20) != 'l') continue;
      ++lengths;
      CHECK_EQ(std::stoul(std::string(value)), whole.size() - found->body);
    }
    CHECK_EQ(lengths, 1u);
    CHECK_EQ(found->headers.size(), std::size(kHeads));
  };
  with_each_change(good, check);
  CHECK(taken > 1000);
}

TEST("lengths that lie, wrap around or are not plain numbers decline a POST") {
  CHECK(read_post(exact(post_of("4", "body"))).has_value());
  CHECK(read_post(exact(post_of("000000004", "body"))).has_value());
  for (const char* const length : {"0", "3", "5", "40", "999999999", "1000000004", "0000000004", "4294967300", "18446744073709551620", "-4", "+4",
                                   "4.0", "4e0", "0x4", "4,4", "4 4", " 4", "4 ", "4\t", "\xd9\xa4", "four"}) {
    CHECK(!read_post(exact(post_of(length, "body"))));
  }
  // What follows a body would be the head of another request.
  CHECK(!read_post(exact(post_of("4", "body" + post_of("4", "body")))));
  CHECK(!read_post(exact(post_of("4\r\ncontent-length: 4", "body"))));
  CHECK(!read_post(exact(post_of("4\r\nTransfer-Encoding: chunked", "body"))));
}

TEST("JSON of which one byte is different is declined, or is what it says") {
  InferRequestReader reader;
  const Bytes tensors(32, 1);
  std::size_t taken[2] = {};
  for (const bool has_tensors : {false, true}) {
    const std::string good = written(sample(true), has_tensors);
    const auto check = [&](const std::string& text) {
      const Bytes bytes = exact(text);
      const InferRequest* const found = has_tensors ? reader.binary(bytes, tensors) : reader.json(bytes);
      if (found == nullptr) return;
      ++taken[has_tensors];
      CHECK_EQ(found->ids.size(), found->rows * found->names.size());
      CHECK_EQ(written(*found, has_tensors), without_blanks(text));
    };
    check(good);
    CHECK_EQ(taken[has_tensors], 1u);
    with_each_change(good, check);
    for (std::size_t size = 0; size < good.size(); ++size) {
      const Bytes cut = exact(good.substr(0, size));
      CHECK((has_tensors ? reader.binary(cut, tensors) : reader.json(cut)) == nullptr);
    }
  }
  CHECK(taken[0] > 500 && taken[1] > 500);
}

TEST("a message of which one byte is different is declined, or is what it says") {
  InferRequestReader reader;
  for (const bool raw : {false, true}) {
    const Bytes good = written(sample(raw));
    std::size_t taken = 0;
    const auto check = [&](const std::string& text) {
      const Bytes bytes = exact(text);
      const InferRequest* const found = reader.message(bytes);
      if (found == nullptr) return;
      ++taken;
      CHECK_EQ(found->raw, raw);
      CHECK_EQ(text_of(written(*found)), text);
    };
    check(text_of(good));
    CHECK_EQ(taken, 1u);
    with_each_change(text_of(good), check);
    CHECK(taken > 500);
  }
}

TEST("lengths in messages that lie or wrap around are declined") {
  InferRequestReader reader;
  const Bytes packed{1, 2}, input = input_of("a", 2, packed, false);
  const std::string name = text_of(Message().text(1, "a").bytes), good = text_of(Message().text(1, "m").data(5, input).bytes);
  REQUIRE(reader.message(exact(good)) != nullptr);
  // Where the length of each field is: the model, the input, its name, its datatype, its contents and the ids in them.
  for (const std::size_t at : {1u, 4u, 6u, 9u, 18u, 20u}) {
    const auto length = static_cast<std::uint64_t>(good[at]);
    REQUIRE(length > 0 && at + length < good.size());
    for (const std::uint64_t lie : {length - 1, length + 1, length + 2, good.size(), length + (std::uint64_t{1} << 32),
                                    std::uint64_t{1} << 63, ~std::uint64_t{0}, ~std::uint64_t{0} - at}) {
      const std::string text = good.substr(0, at) + text_of(Message().varint(lie).bytes) + good.substr(at + 1);
      CHECK(reader.message(exact(text)) == nullptr);
    }
    // More bits than a length has: 2^64 + length.
    std::string wrapped = good.substr(0, at) + std::string(1, static_cast<char>(length | 0x80)) + std::string(8, '\x80') + "\x02";
    CHECK(reader.message(exact(wrapped + good.substr(at + 1))) == nullptr);
  }
}
