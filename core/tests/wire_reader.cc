// Messages come from other machines. The reader must never look behind their end, and must refuse what is not the wire format,
// or a length in a record decides what memory is read.
#include "wire.h"

#include <cstdint>
#include <random>
#include <vector>

#include "check.h"
#include "hand_written_message.h"

namespace {

using monolith::wire::Malformed;
using monolith::wire::Reader;
using monolith::wire::Type;

// The bytes on the heap, exactly as many as there are, so that the address sanitizer sees a read behind them.
template <typename F>
auto read(const Bytes& bytes, F&& f) {
  const Bytes exact(bytes);
  Reader reader(exact);
  return f(reader);
}

bool malformed(const Bytes& bytes, const std::function<void(Reader&)>& f) {
  try {
    read(bytes, [&](Reader& reader) { f(reader); });
    return false;
  } catch (const Malformed&) {
    return true;
  }
}

}  // namespace

TEST("varints of every length come back") {
  for (int bit = 0; bit < 64; ++bit) {
    for (const std::uint64_t value : {std::uint64_t{1} << bit, (std::uint64_t{1} << bit) - 1, ~(std::uint64_t{1} << bit)}) {
      const Bytes bytes = Message().varint(value).bytes;
      REQUIRE(read(bytes, [](Reader& reader) { return reader.varint(); }) == value);
      for (std::size_t n = 0; n < bytes.size(); ++n) {
        REQUIRE(malformed(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n)), [](Reader& r) { r.varint(); }));
      }
    }
  }
}

TEST("a varint ends after ten bytes at most") {
  Bytes endless(10, 0xff);
  CHECK(malformed(endless, [](Reader& reader) { reader.varint(); }));
  endless.push_back(1);
  CHECK(malformed(endless, [](Reader& reader) { reader.varint(); }));
  Bytes longest(9, 0xff);
  longest.push_back(1);
  CHECK_EQ(read(longest, [](Reader& reader) { return reader.varint(); }), ~std::uint64_t{0});
}

TEST("tags and lengths end after five bytes at most, as in protobuf") {
  for (const unsigned first : {1u << 3, 0u}) {
    for (std::size_t zeros = 0; zeros < 10; ++zeros) {
      Bytes bytes(1 + zeros, 0x80);
      bytes.front() = static_cast<std::uint8_t>(first | 0x80);
      bytes.push_back(0);
      const bool too_long = bytes.size() > 5;
      if (first != 0) CHECK_EQ(malformed(bytes, [](Reader& reader) { reader.tag(); }), too_long);
      if (first == 0) CHECK_EQ(malformed(bytes, [](Reader& reader) { reader.bytes(); }), too_long);
      CHECK_EQ(malformed(bytes, [](Reader& reader) { reader.varint(); }), bytes.size() > 10);
    }
  }
}

TEST("numbers of fixed size need all their bytes") {
  const Bytes eight = {1, 2, 3, 4, 5, 6, 7, 8};
  CHECK_EQ(read(eight, [](Reader& reader) { return reader.fixed<std::uint64_t>(); }), 0x0807060504030201ull);
  CHECK_EQ(read(eight, [](Reader& reader) { return reader.fixed<std::uint32_t>(); }), 0x04030201u);
  for (std::size_t n = 0; n < 8; ++n) {
    const Bytes part(eight.begin(), eight.begin() + static_cast<std::ptrdiff_t>(n));
    CHECK(malformed(part, [](Reader& reader) { reader.fixed<std::uint64_t>(); }));
    CHECK_EQ(malformed(part, [](Reader& reader) { reader.fixed<std::uint32_t>(); }), n < 4);
  }
}

TEST("a length cannot reach behind the message") {
  for (const std::uint64_t length : {std::uint64_t{4}, std::uint64_t{1} << 31, ~std::uint64_t{0}}) {
    Bytes bytes = Message().varint(length).bytes;
    bytes.insert(bytes.end(), {7, 8, 9});
    CHECK(malformed(bytes, [](Reader& reader) { reader.bytes(); }));
  }
  const Bytes right = {3, 7, 8, 9, 5};
  read(right, [](Reader& reader) {
    const auto bytes = reader.bytes();
    CHECK_EQ(bytes.size(), 3u);
    CHECK_EQ(static_cast<int>(bytes[2]), 9);
    CHECK(!reader.done());
    CHECK_EQ(reader.varint(), 5u);
    CHECK(reader.done());
    return 0;
  });
  CHECK_EQ(read({0}, [](Reader& reader) { return reader.bytes().size(); }), 0u);
}

TEST("tags have a field number and one of four types") {
  for (const std::uint32_t field : {1u, 15u, 16u, 100u, (1u << 29) - 1}) {
    for (std::uint32_t type = 0; type < 8; ++type) {
      const Bytes bytes = Message().varint(std::uint64_t{field} << 3 | type).bytes;
      const bool known = type == 0 || type == 1 || type == 2 || type == 5;
      CHECK_EQ(malformed(bytes, [](Reader& reader) { reader.tag(); }), !known);
      if (!known) continue;
      const auto tag = read(bytes, [](Reader& reader) { return reader.tag(); });
      CHECK_EQ(tag.field, field);
      CHECK_EQ(static_cast<std::uint32_t>(tag.type), type);
    }
  }
  CHECK(malformed({0}, [](Reader& reader) { reader.tag(); }));  // field 0
  CHECK(malformed(Message().varint(std::uint64_t{1} << 32).bytes, [](Reader& reader) { reader.tag(); }));
}

TEST("skipping a field leaves the reader at the next") {
  Bytes bytes = Message().number(1, 300).bytes;
  bytes.push_back(2 << 3 | 1);
  bytes.insert(bytes.end(), 8, 0xee);
  const Bytes third = Message().text(3, "abc").bytes;
  bytes.insert(bytes.end(), third.begin(), third.end());
  bytes.push_back(4 << 3 | 5);
  bytes.insert(bytes.end(), 4, 0xee);
  read(bytes, [](Reader& reader) {
    for (std::uint32_t field = 1; field <= 4; ++field) {
      const auto tag = reader.tag();
      CHECK_EQ(tag.field, field);
      reader.skip(tag.type);
    }
    CHECK(reader.done());
    return 0;
  });
}

TEST("only bytes are a submessage") {
  const Bytes bytes = {2, 8, 1};
  read(bytes, [](Reader& reader) {
    CHECK_EQ(monolith::wire::submessage(reader, Type::kBytes).size(), 2u);
    return 0;
  });
  for (const Type type : {Type::kVarint, Type::kFixed32, Type::kFixed64}) {
    CHECK(malformed(bytes, [&](Reader& reader) { monolith::wire::submessage(reader, type); }));
  }
}

TEST("random bytes are read to their end or refused") {
  std::mt19937 random(8);
  for (int round = 0; round < 20000; ++round) {
    Bytes bytes(random() % 24);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() % 3 == 0 ? random() : random() % 48);
    try {
      read(bytes, [](Reader& reader) {
        while (!reader.done()) reader.skip(reader.tag().type);
        return 0;
      });
    } catch (const Malformed&) {
    }
  }
}
