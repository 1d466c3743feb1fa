// Reads the protobuf wire format. Every step is bounds checked; what does not fit throws Malformed.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>

namespace monolith::wire {

static_assert(std::endian::native == std::endian::little, "fixed-size numbers are read as they lie in memory");

// The bytes are not the message they should be. Has no text: the reader of the record knows where it was.
struct Malformed {};

enum Type : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

using Bytes = std::span<const std::uint8_t>;

class Reader {
 public:
  explicit Reader(Bytes message) : at_(message.data()), end_(message.data() + message.size()) {}

  bool done() const { return at_ == end_; }

  std::uint64_t varint() {
    if (at_ != end_ && *at_ < 0x80) return *at_++;
    return long_varint(10);
  }

  template <typename T>
  T fixed() {
    T value;
    if (static_cast<std::size_t>(end_ - at_) < sizeof value) throw Malformed{};
    std::memcpy(&value, at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

  Bytes bytes() {
    const std::uint64_t size = short_varint();
    if (size > static_cast<std::size_t>(end_ - at_)) throw Malformed{};
    const Bytes value(at_, static_cast<std::size_t>(size));
    at_ += size;
    return value;
  }

  // The next field's number and type, in this order. Groups, which none of our messages ever had, are refused.
  struct Tag {
    std::uint32_t field;
    Type type;
  };
  Tag tag() {
    const std::uint64_t value = short_varint();
    const auto type = static_cast<std::uint32_t>(value & 7);
    if (value < 8 || value > UINT32_MAX || type == 3 || type == 4 || type > 5) throw Malformed{};
    return {static_cast<std::uint32_t>(value >> 3), static_cast<Type>(type)};
  }

  void skip(Type type) {
    switch (type) {
      case kVarint: varint(); break;
      case kFixed64: fixed<std::uint64_t>(); break;
      case kBytes: bytes(); break;
      case kFixed32: fixed<std::uint32_t>(); break;
    }
  }

 private:
  // A tag or a length. Protobuf refuses longer ones, even of zeros.
  std::uint64_t short_varint() {
    if (at_ != end_ && *at_ < 0x80) return *at_++;
    return long_varint(5);
  }

  std::uint64_t long_varint(int most_bytes) {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 7 * most_bytes; shift += 7) {
      if (at_ == end_) throw Malformed{};
      const std::uint8_t byte = *at_++;
      value |= static_cast<std::uint64_t>(byte & 0x7f) << (shift & 63);
      if (byte < 0x80) return value;
    }
    throw Malformed{};
  }

  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

// The bytes of a length-delimited field; any other type means that this is not the message it should be.
inline Bytes submessage(Reader& reader, Type type) {
  if (type != kBytes) throw Malformed{};
  return reader.bytes();
}

}  // namespace monolith::wire
