// Danger: one header block that is read otherwise than it was written, after which every further request of the connection has other
// headers than its client sent. The blocks are the examples of RFC 7541, appendix C, and may never change.
#include "monolith/hpack.h"

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

namespace {

using namespace monolith;

using Fields = std::vector<HeaderField>;

std::vector<std::uint8_t> bytes(const std::string& hex) {
  std::vector<std::uint8_t> found;
  for (std::size_t at = 0; at < hex.size(); at += 2) found.push_back(static_cast<std::uint8_t>(std::stoi(hex.substr(at, 2), nullptr, 16)));
  return found;
}

// As "name: value" lines.
std::string decoded(HpackDecoder& decoder, const std::string& hex, std::size_t max_bytes = 1 << 14) {
  Fields fields;
  std::string text = decoder.decode(bytes(hex), max_bytes, fields) ? "" : "too long\n";
  for (const auto& [name, value] : fields) text += name + ": " + value + "\n";
  return text;
}

std::string decoded(const std::string& hex) {
  HpackDecoder decoder;
  return decoded(decoder, hex);
}

const std::string kFirst = ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\n";
const std::string kSecond = kFirst + "cache-control: no-cache\n";
const std::string kThird =
    ":method: GET\n:scheme: https\n:path: /index.html\n:authority: www.example.com\ncustom-key: custom-value\n";

std::string response(const char* status, const char* date) {
  return std::string(":status: ") + status + "\ncache-control: private\ndate: " + date + "\nlocation: https://www.example.com\n";
}

const char* const kDate = "Mon, 21 Oct 2013 20:13:21 GMT";
const char* const kLater = "Mon, 21 Oct 2013 20:13:22 GMT";
const std::string kCookie = "content-encoding: gzip\nset-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1\n";

// :status, cache-control, date, location, content-encoding, set-cookie: those of the third response come in another order.
std::string third_response() {
  return std::string(":status: 200\ncache-control: private\ndate: ") + kLater + "\nlocation: https://www.example.com\n" + kCookie;
}

}  // namespace

TEST("single fields, C.2") {
  CHECK_EQ(decoded("400a637573746f6d2d6b65790d637573746f6d2d686561646572"), "custom-key: custom-header\n");
  CHECK_EQ(decoded("040c2f73616d706c652f70617468"), ":path: /sample/path\n");
  CHECK_EQ(decoded("100870617373776f726406736563726574"), "password: secret\n");
  CHECK_EQ(decoded("82"), ":method: GET\n");
}

TEST("requests on one connection, plain and with Huffman codes, C.3 and C.4") {
  for (const std::vector<std::string>& blocks :
       {std::vector<std::string>{"828684410f7777772e6578616d706c652e636f6d", "828684be58086e6f2d6361636865",
                                 "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565"},
        std::vector<std::string>{"828684418cf1e3c2e5f23a6ba0ab90f4ff", "828684be5886a8eb10649cbf",
                                 "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf"}}) {
    HpackDecoder decoder;
    CHECK_EQ(decoded(decoder, blocks[0]), kFirst);
    CHECK_EQ(decoder.table_bytes(), 57u);
    CHECK_EQ(decoded(decoder, blocks[1]), kSecond);
    CHECK_EQ(decoder.table_bytes(), 110u);
    CHECK_EQ(decoded(decoder, blocks[2]), kThird);
    CHECK_EQ(decoder.table_bytes(), 164u);
  }
}

TEST("responses that push out earlier fields, plain and with Huffman codes, C.5 and C.6") {
  for (const std::vector<std::string>& blocks :
       {std::vector<std::string>{
            "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e17"
            "68747470733a2f2f7777772e6578616d706c652e636f6d",
            "4803333037c1c0bf",
            "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d4153444a4b48514b425a584f"
            "5157454f50495541585157454f49553b206d61782d6167653d333630303b2076657273696f6e3d31"},
        std::vector<std::string>{
            "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97c8e9ae82ae43d3",
            "4883640effc1c0bf",
            "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672c1"
            "ab270fb5291f9587316065c003ed4ee5b1063d5007"}}) {
    HpackDecoder decoder(256);
    CHECK_EQ(decoded(decoder, blocks[0]), response("302", kDate));
    CHECK_EQ(decoder.table_bytes(), 222u);
    CHECK_EQ(decoded(decoder, blocks[1]), response("307", kDate));
    CHECK_EQ(decoder.table_bytes(), 222u);
    CHECK_EQ(decoded(decoder, blocks[2]), third_response());
    CHECK_EQ(decoder.table_bytes(), 215u);
  }
}

TEST("each byte has the Huffman code of appendix B") {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  const std::string codes =
      "ffc7fffd8fffffe2fffffe3fffffe4fffffe5fffffe6fffffe7fffffe8ffffeafffffff3fffffa7fffffabffffffdfffffebfffffecfffffedff"
      "fffeefffffefffffff0ffffff1ffffff2fffffffbfffffcffffffd3fffffd7fffffdbfffffdffffffe3fffffe7fffffebfffffed4fe3f9ffaffc"
      "abf1febfafefe7fdfd2cbb00089969b71d79fb9f7fff20ffbff3ff50ddbd7f061c58f265cd9f469d5af66dddbf871e5f9cff7ff7fffc3ff9ffe4"
      "5fff4719242cb34e6e9d68a6a3d7dac426defe3cfaf7fffbfe7ffbffdffffffcfffe6ffff4bfff9ffffa3fffd3ffff53fffd5ffffb3fffeb7fff"
      "daffffb7ffff73fffeeffffdeffffebffffbfffffd9ffffdbfffebffffe0ffffeeffffc3ffff8bffff1ffffe4fffee7fffb1ffff97fffd9ffffc"
      "dffff9fffffbffffdafffeeffff4ffffb7fffee7fffe8ffffd3fffdeffffd5fffeeffffbdffffe1fffdfffff7fffff5ffffecffff07fff87fffe"
      "0ffff17fffedffff87ffff77fffeffffeaffff8bfffe3ffff93ffff87fffcbffff37ffff1fffff83ffffe1fffebfffe3ffff3fffff2ffffa3fff"
      "fd9fffff17ffffc7fffff27ffffdefffffbffffff2fffff8fffffb7fff97fff8fffffe6fffffc1fffff87ffffe7fffffc5ffffe5fffe4ffff2ff"
      "fffd1fffff4ffffffefffffe3fffffc9fffff97fffb3ffffcffffb7fffcdffff4ffff9ffffd1ffffcffffeaffffafffffddffffeffffff4fffff"
      "5fffffabffffa7ffffd7fffff9bffffecfffffb7fffff3fffffe8fffffd3fffffabfffff5fffffff7ffffecfffffdbfffffbbfffff7ffffff0ff"
      "fffbbf";
  CHECK_EQ(decoded("000161ffc803" + codes), "a: " + all + "\n");
}

TEST("what is damaged is refused") {
  const char* const blocks[] = {
      "80",                  // index 0
      "be",                  // a place in the empty table
      "7f80808080808001",    // a number that is too large
      "00",                  // no name
      "000161",              // no value
      "00016105",            // a value longer than the block
      "3fe21f",              // a larger table than was allowed (4097)
      "8220",                // another size of the table after a field
      "0001618400000000ff",  // behind the end: 8 ones are a byte of padding
      "00016181ff",          // 8 ones of padding
      "0001618118",          // padding with a zero (a, then 000)
      "00016184ffffffff",    // the code of the end
  };
  for (const std::string block : blocks) CHECK_THROWS(decoded(block), HpackError);
}

TEST("fields beyond the limit are left out, but kept in the table") {
  HpackDecoder decoder;
  CHECK_EQ(decoded(decoder, "400a637573746f6d2d6b65790d637573746f6d2d686561646572", 54), "too long\n");
  CHECK_EQ(decoder.table_bytes(), 55u);
  CHECK_EQ(decoded(decoder, "be", 55), "custom-key: custom-header\n");
}

TEST("a table can be made smaller and larger again, and takes no field that is larger than it") {
  HpackDecoder decoder;
  decoded(decoder, "400a637573746f6d2d6b65790d637573746f6d2d686561646572");
  CHECK_EQ(decoded(decoder, "20"), "");
  CHECK_EQ(decoder.table_bytes(), 0u);
  CHECK_EQ(decoded(decoder, "400a637573746f6d2d6b65790d637573746f6d2d686561646572"), "custom-key: custom-header\n");
  CHECK_EQ(decoder.table_bytes(), 0u);
  CHECK_EQ(decoded(decoder, "3fe11f400a637573746f6d2d6b65790d637573746f6d2d686561646572"), "custom-key: custom-header\n");
  CHECK_EQ(decoder.table_bytes(), 55u);
}

TEST("what is encoded is decoded, whatever its length") {
  for (const std::size_t size : {0u, 1u, 126u, 127u, 128u, 254u, 255u, 4000u}) {
    std::string block;
    encode_field("a-name", std::string(size, '\xfe'), block);
    HpackDecoder decoder;
    Fields fields;
    CHECK(decoder.decode({reinterpret_cast<const std::uint8_t*>(block.data()), block.size()}, 1 << 14, fields));
    CHECK(fields == Fields({{"a-name", std::string(size, '\xfe')}}));
    CHECK_EQ(decoder.table_bytes(), 0u);
  }
}
