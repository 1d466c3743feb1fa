// Requests come from whoever reaches the port. The short readers may find only what the readers of all requests find, must leave
// everything else to them, and read no byte outside. What they find is compared with those readers in Python's tests.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "hand_written_message.h"
#include "monolith/http_request.h"
#include "monolith/infer_request.h"

namespace {

using namespace monolith;
using Ids = std::vector<std::int64_t>;

// A copy of exactly its size lets the address sanitizer see a read outside.
Bytes exact(const std::string& text) { return {text.begin(), text.end()}; }

const std::string kJson = R"({"id":"r","inputs":[{"name":"a","datatype":"INT64","shape":[2],"data":[1,-2]},)"
                          R"( {"data":[3,9223372036854775807],"shape":[2],"datatype":"INT64","name":"b"}],)"
                          R"("parameters":{"binary_data_output":false,"timeout":70,"route_key":"k"}})";
const std::string kHead = R"({"inputs":[{"name":"a","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}},)"
                          R"({"name":"b","datatype":"INT64","shape":[1],"parameters":{"binary_data_size":8}}]})";
const Bytes kTensors{1, 0, 0, 0, 0, 0, 0, 0, 254, 255, 255, 255, 255, 255, 255, 255};
const std::string kPost = "POST /v2/models/m/infer HTTP/1.1\r\nHost: a:1\r\nConnection: Keep-Alive\r\nContent-Length: 4\r\n\r\nbody";

Bytes message(bool raw) {
  const auto input = [&](const char* name, std::uint8_t id) {
    Message one = Message().text(1, name).text(2, "INT64").number(3, 1);
    return raw ? one.bytes : one.data(5, Message().data(3, {id}).bytes).bytes;
  };
  Message all = Message().text(1, "m").text(2, "3").text(3, "r").data(5, input("a", 1)).data(5, input("b", 2));
  return raw ? all.data(7, {1, 0, 0, 0, 0, 0, 0, 0}).data(7, {2, 0, 0, 0, 0, 0, 0, 0}).bytes : all.bytes;
}

bool takes(const std::string& json) {
  InferRequestReader reader;
  return reader.json(exact(json)) != nullptr;
}

std::string replaced(std::string text, const std::string& part, const std::string& with) {
  const std::size_t at = text.find(part);
  REQUIRE(at != std::string::npos);
  return text.replace(at, part.size(), with);
}

}  // namespace

TEST("JSON: ids by column, with the values of the request") {
  InferRequestReader reader;
  const Bytes text = exact(kJson);
  const InferRequest* const found = reader.json(text);
  REQUIRE(found != nullptr);
  CHECK(found->names == (std::vector<std::string_view>{"a", "b"}));
  CHECK(found->ids == (Ids{1, -2, 3, 9223372036854775807}));
  CHECK_EQ(found->rows, 2u);
  CHECK(found->id == "r" && found->route_key == "k" && found->timeout == 70u && found->binary_output == false);
  CHECK(!reader.same_names());
  CHECK(reader.json(text) != nullptr && reader.same_names());
}

TEST("tensors behind JSON, and messages with raw or typed contents") {
  InferRequestReader reader;
  const Bytes head = exact(kHead);
  const InferRequest* found = reader.binary(head, kTensors);
  REQUIRE(found != nullptr);
  CHECK(found->ids == (Ids{1, -2}));
  for (const bool raw : {false, true}) {
    const Bytes bytes = message(raw);
    found = reader.message(bytes);
    REQUIRE(found != nullptr);
    CHECK(found->ids == (Ids{1, 2}) && found->rows == 1 && found->model == "m" && found->version == "3" && found->id == "r");
  }
}

TEST("JSON that another reader has to read") {
  const std::pair<const char*, const char*> changes[] = {
      {"[1,-2]", "[1,2,3]"},
      {"[1,-2]", "[1]"},
      {"[1,-2]", "[1,2.0]"},
      {"[1,-2]", "[1,true]"},
      {"[1,-2]", "[[1],[2]]"},
      {"[1,-2]", "[1,-0]"},
      {"[1,-2]", "[1,1e2]"},
      {"[1,-2]", "[1,null]"},
      {"[1,-2]", "[1,9223372036854775808]"},
      {"[1,-2]", "[1,-9223372036854775808]"},
      {"[1,-2]", "[1,02]"},
      {"[1,-2]", "[]"},
      {"\"shape\":[2]", "\"shape\":[2,1]"},
      {"\"shape\":[2]", "\"shape\":[]"},
      {"INT64", "INT32"},
      {"\"b\"", "\"a\""},
      {"\"b\"", "\"\\u0061\""},
      {"\"b\"", "\"\xc3\xa9\""},
      {"\"id\":\"r\"", "\"id\":7"},
      {"\"id\"", "\"inputs\""},
      {"\"id\"", "\"outputs\""},
      {"timeout\":70", "timeout\":-7"},
      {"timeout\":70", "top_k\":7"},
      {"timeout\":70", "timeout\":7,\"timeout\":8"},
      {"\"data\"", "\"parameters\":{},\"data\""},
      {"\"name\":\"b\"", "\"name\":\"b\",\"name\":\"c\""},
      {"}}", "}} ,"},
  };
  CHECK(takes(kJson));
  for (const auto& [part, with] : changes) {
    const bool taken = takes(replaced(kJson, part, with));
    if (taken) std::cerr << part << " -> " << with << "\n";
    CHECK(!taken);
  }
  InferRequestReader reader;
  for (const char* const size : {"0", "7", "16", "9223372036854775800"}) {
    CHECK(reader.binary(exact(replaced(kHead, ":8}", std::string(":") + size + "}")), kTensors) == nullptr);
  }
  CHECK(reader.binary(exact(kHead), {}) == nullptr);
  CHECK(reader.binary(exact(kHead), Bytes(24)) == nullptr);
}

TEST("requests that are cut or damaged anywhere") {
  InferRequestReader reader;
  const Bytes json = exact(kJson), head = exact(kHead), post = exact(kPost);
  for (const Bytes& whole : {json, head, message(true), message(false), post}) {
    for (std::size_t size = 0; size < whole.size(); ++size) {
      const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size));
      CHECK(reader.json(cut) == nullptr && reader.binary(cut, kTensors) == nullptr && !read_post(cut));
      // A message without its last inputs is one.
      const InferRequest* const found = reader.message(cut);
      CHECK(found == nullptr || found->ids.size() == found->names.size());
    }
    for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
      Bytes damaged = whole;
      damaged[bit / 8] = static_cast<std::uint8_t>(damaged[bit / 8] ^ (1u << bit % 8));
      const auto has_one_shape = [](const InferRequest* found) {
        return found == nullptr || (found->rows > 0 && found->ids.size() == found->rows * found->names.size());
      };
      CHECK(has_one_shape(reader.json(damaged)));
      CHECK(has_one_shape(reader.binary(damaged, kTensors)));
      CHECK(has_one_shape(reader.message(damaged)));
      if (const auto found = read_post(damaged)) CHECK(found->body <= damaged.size());
    }
  }
}

TEST("a POST that is whole, and heads that another reader has to read") {
  const Bytes whole = exact(kPost);
  const auto found = read_post(whole);
  REQUIRE(found.has_value());
  CHECK(found->url == "/v2/models/m/infer");
  CHECK_EQ(found->headers.size(), 3u);
  CHECK(found->headers[1].name == "Connection" && found->headers[1].value == "Keep-Alive");
  CHECK_EQ(found->body, whole.size() - 4);
  const std::pair<const char*, const char*> changes[] = {
      {"POST", "GET"},
      {"POST", "post"},
      {"1.1", "1.0"},
      {"/v2", "v2"},
      {"/v2", "/v2 "},
      {"/v2", "/v2?a"},
      {"Keep-Alive", "close"},
      {"Host", "Upgrade"},
      {"Host", "Expect"},
      {"Host", "Transfer-Encoding"},
      {"Host", "content-length"},
      {"Host", "CONNECTION"},
      {"Host", ""},
      {"Host", "Ho st"},
      {": a:1", ":a:1"},
      {": a:1", ":  a:1"},
      {": a:1", ": a:1 "},
      {": a:1", ": \x01"},
      {": a:1", ": "},
      {"a:1\r\n", "a:1\n"},
      {"a:1\r\n", "a:1\r\n b\r\n"},
      {": 4", ": 3"},
      {": 4", ": 5"},
      {": 4", ": +4"},
      {": 4", ": 0x4"},
      {": 4", ": 4, 4"},
      {"Content-Length: 4\r\n", ""},
  };
  for (const auto& [part, with] : changes) {
    const bool taken = read_post(exact(replaced(kPost, part, with))).has_value();
    if (taken) std::cerr << part << " -> " << with << "\n";
    CHECK(!taken);
  }
  std::string many;
  for (std::size_t i = 0; i < kMaxHttpHeaders; ++i) many += "a" + std::to_string(i) + ": 1\r\n";
  CHECK(!read_post(exact(replaced(kPost, "Host", many + "Host"))));
  CHECK(!read_post(exact(replaced(kPost, "a:1", std::string(kMaxHttpHead, 'a')))));
}

// One input of a message, as its fields. Fields are added in any order.
Message input(const char* name) { return Message().text(1, name).text(2, "INT64"); }

bool takes_message(const Message& message) {
  InferRequestReader reader;
  return reader.message(message.bytes) != nullptr;
}

TEST("messages in other forms that mean the same") {
  const Bytes one{7, 0, 0, 0, 0, 0, 0, 0};
  InferRequestReader reader;
  const Message forms[] = {
      Message().text(1, "m").data(5, input("a").number(3, 1).bytes).data(7, one),
      Message().text(1, "m").data(5, input("a").data(3, {1}).bytes).data(7, one),
      Message().text(1, "m").data(5, Message().number(3, 1).text(2, "INT64").text(1, "a").bytes).data(7, one),
      Message().data(5, input("a").number(3, 1).bytes).data(7, one).text(1, "m"),
      Message().data(5, input("a").number(3, 1).data(5, Message().data(3, {7}).bytes).bytes).text(1, "m"),
  };
  for (const Message& form : forms) {
    const InferRequest* const found = reader.message(form.bytes);
    REQUIRE(found != nullptr);
    CHECK(found->ids == Ids{7});
    CHECK(found->names == std::vector<std::string_view>{"a"});
    CHECK(found->model == "m" && found->version.empty() && found->id.empty());
  }
  const Bytes negative = Message().varint(static_cast<std::uint64_t>(-3)).bytes;
  const Message typed = Message().data(5, input("a").number(3, 1).data(5, Message().data(3, negative).bytes).bytes);
  const InferRequest* const found = reader.message(typed.bytes);
  REQUIRE(found != nullptr);
  CHECK(found->ids == Ids{-3});
}

TEST("messages that another reader has to read") {
  const Bytes one(8, 1);
  const Bytes shaped = input("a").number(3, 1).bytes;
  const auto with = [&](const Message& given) { return Message().data(5, given.bytes).data(7, one); };
  CHECK(takes_message(with(input("a").number(3, 1))));
  const Message unusual[] = {
      // Inputs of other shapes and datatypes, and with fields that are missing, repeated or unknown.
      with(input("a")),
      with(input("a").number(3, 0)),
      with(input("a").number(3, 2)),
      with(input("a").number(3, 1).number(3, 1)),
      with(input("a").data(3, {1, 1})),
      with(input("a").data(3, {})),
      with(input("a").number(3, static_cast<std::uint64_t>(-1))),
      with(input("a").number(3, std::uint64_t{1} << 61)),
      with(input("a").number(3, 1).text(1, "b")),
      with(input("a").number(3, 1).text(2, "INT64")),
      with(input("a").number(3, 1).text(4, "")),
      with(input("a").number(3, 1).number(9, 1)),
      with(input("\xc3\xa9").number(3, 1)),
      with(Message().text(1, "a").text(2, "INT32").number(3, 1)),
      with(Message().text(1, "a").number(3, 1)),
      with(Message().text(2, "INT64").number(3, 1)),
      // Contents of another type, not packed, of another size, or beside raw ones.
      with(input("a").number(3, 1).data(5, Message().data(3, {1}).bytes)),
      Message().data(5, input("a").number(3, 1).data(5, Message().data(2, {1}).bytes).bytes),
      Message().data(5, input("a").number(3, 1).data(5, Message().number(3, 1).bytes).bytes),
      Message().data(5, input("a").number(3, 1).data(5, Message().data(3, {1, 2}).bytes).bytes),
      Message().data(5, input("a").number(3, 1).data(5, Message().data(3, {}).bytes).bytes),
      Message().data(5, input("a").number(3, 1).data(5, Message().data(3, {1}).data(3, {1}).bytes).bytes),
      // Raw contents that are missing, too many, too short, or before an input.
      Message().data(5, shaped),
      Message().data(5, shaped).data(7, one).data(7, one),
      Message().data(5, shaped).data(7, Bytes(7, 1)),
      Message().data(5, shaped).data(7, Bytes(16, 1)),
      Message().data(7, one).data(5, shaped),
      // Of requests: parameters, chosen outputs, fields twice or unknown, the same input twice, no input.
      Message().data(5, shaped).data(7, one).data(4, {}),
      Message().data(5, shaped).data(7, one).data(6, {}),
      Message().data(5, shaped).data(7, one).data(9, {}),
      Message().data(5, shaped).data(7, one).number(1, 1),
      Message().text(1, "m").data(5, shaped).data(7, one).text(1, "n"),
      Message().text(3, std::string(1025, 'r')).data(5, shaped).data(7, one),
      Message().data(5, shaped).data(5, shaped).data(7, one).data(7, one),
      Message().text(1, "m"),
      Message(),
  };
  for (const Message& message : unusual) {
    const bool taken = takes_message(message);
    if (taken) std::cerr << "message " << &message - unusual << "\n";
    CHECK(!taken);
  }
}

TEST("JSON with blanks, and with the fields of inputs in any order") {
  std::vector<std::string> fields{R"("name" : "a")", R"("datatype" : "INT64")", R"("shape" : [ 2 ])", R"("data" : [ 5 , -6 ])"};
  std::sort(fields.begin(), fields.end());
  InferRequestReader reader;
  std::size_t orders = 0;
  do {
    for (const char* const blank : {"", " ", "\t\r\n "}) {
      std::string text = std::string("{\"inputs\":[{") + blank;
      for (const std::string& field : fields) text += field + blank + (&field == &fields.back() ? "}" : ",") + blank;
      const Bytes json = exact(text + "]" + blank + "}" + blank);
      const InferRequest* const found = reader.json(json);
      REQUIRE(found != nullptr);
      CHECK(found->ids == (Ids{5, -6}));
      CHECK_EQ(found->rows, 2u);
      ++orders;
    }
  } while (std::next_permutation(fields.begin(), fields.end()));
  CHECK_EQ(orders, 24u * 3u);
}

std::string request_of(const std::vector<std::string>& names) {
  std::string text = "{\"inputs\":[";
  for (const std::string& name : names) {
    text += (text.back() == '[' ? "" : ",") + std::string("{\"name\":\"") + name + R"(","datatype":"INT64","shape":[1],"data":[1]})";
  }
  return text + "]}";
}

TEST("names are only the same if all are, in their order and with their lengths") {
  InferRequestReader reader;
  const auto is_same = [&](const std::vector<std::string>& names) {
    REQUIRE(reader.json(exact(request_of(names))) != nullptr);
    return reader.same_names();
  };
  CHECK(!is_same({"a", "b"}));
  CHECK(is_same({"a", "b"}));
  CHECK(!is_same({"b", "a"}));
  CHECK(!is_same({"ba"}));
  CHECK(!is_same({"b", "a"}));
  CHECK(!is_same({"b", "a", ""}));
  // What another reader reads leaves the names as they are.
  CHECK(reader.json(exact(request_of({"c", "c"}))) == nullptr);
  CHECK(is_same({"b", "a", ""}));
  // Names of any length are read, and long ones are not kept.
  const std::vector<std::string> longest{std::string(1 << 17, 'x'), "y"};
  CHECK(!is_same(longest));
  CHECK(!is_same(longest));
}

TEST("as many inputs as are allowed, and one more") {
  std::vector<std::string> names;
  for (int i = 0; i < 4096; ++i) names.push_back(std::to_string(i));
  CHECK(takes(request_of(names)));
  names.push_back("4096");
  CHECK(!takes(request_of(names)));
}

TEST("ids of requests up to 1,024 characters") {
  CHECK(takes(replaced(kJson, "\"r\"", "\"" + std::string(1024, 'r') + "\"")));
  CHECK(!takes(replaced(kJson, "\"r\"", "\"" + std::string(1025, 'r') + "\"")));
}

TEST("bodies of any bytes and of no byte") {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{100000}}) {
    std::string body(size, '\0');
    for (std::size_t i = 0; i < size; ++i) body[i] = static_cast<char>(i % 256);
    const Bytes whole = exact("POST / HTTP/1.1\r\ncontent-length: " + std::to_string(size) + "\r\n\r\n" + body);
    const auto found = read_post(whole);
    REQUIRE(found.has_value());
    CHECK_EQ(whole.size() - found->body, size);
    CHECK(std::equal(body.begin(), body.end(), whole.begin() + static_cast<std::ptrdiff_t>(found->body), [](char a, std::uint8_t b) {
      return static_cast<std::uint8_t>(a) == b;
    }));
  }
}

TEST("bytes that a head may have in each of its parts") {
  const auto accepted = [](const std::string& part, const std::string& before, const std::string& after) {
    std::string letters;
    for (int byte = 0; byte < 256; ++byte) {
      const std::string text = before + std::string(1, static_cast<char>(byte)) + after;
      if (read_post(exact(replaced(kPost, part, text)))) letters += static_cast<char>(byte);
    }
    return letters;
  };
  const std::string digits = "0123456789";
  const std::string upper = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
  const std::string lower = "abcdefghijklmnopqrstuvwxyz";
  CHECK_EQ(accepted("/v2", "/", "v2"), "%-./" + digits + upper + "_" + lower);
  CHECK_EQ(accepted("Host", "H", "ost"), "-" + digits + upper + "_" + lower);
  std::string printable;
  for (char letter = ' '; letter <= '~'; ++letter) printable += letter;
  CHECK_EQ(accepted("a:1", "a", "1"), printable);
}

TEST("whole numbers of 64 bits at their limits") {
  InferRequestReader reader;
  const std::int64_t ids[] = {
      0,
      -1,
      std::int64_t{1} << 53,
      (std::int64_t{1} << 53) + 1,
      -9223372036854775807,
      9223372036854775806,
  };
  for (const std::int64_t id : ids) {
    const Bytes text = exact(replaced(kJson, "[1,-2]", "[1," + std::to_string(id) + "]"));
    const InferRequest* const found = reader.json(text);
    REQUIRE(found != nullptr);
    CHECK_EQ(found->ids[1], id);
  }
}

TEST("memory that is not there is an exception, and the next request is read") {
  const Bytes json = exact(kJson), post = exact(kPost);
  CHECK(failing_new::each_allocation([] { return InferRequestReader(); }, [&](InferRequestReader& reader) { reader.json(json); },
                                     [&](InferRequestReader& reader) { CHECK(reader.json(json) != nullptr); }) >= 2);
  CHECK(failing_new::each_allocation([] { return 0; }, [&](int) { read_post(post); }, [](int) {}) >= 1);
}
