#pragma once

#include <cstdint>
#include <string>
#include <vector>

using Bytes = std::vector<std::uint8_t>;

// Writes messages by hand: the core has no protobuf to write them with.
struct Message {
  Bytes bytes;

  Message& varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<std::uint8_t>(value | 0x80));
    bytes.push_back(static_cast<std::uint8_t>(value));
    return *this;
  }
  Message& number(std::uint32_t field, std::uint64_t value) { return varint(field << 3).varint(value); }
  Message& data(std::uint32_t field, const Bytes& value) {
    varint(field << 3 | 2).varint(value.size());
    bytes.insert(bytes.end(), value.begin(), value.end());
    return *this;
  }
  Message& text(std::uint32_t field, const std::string& value) { return data(field, Bytes(value.begin(), value.end())); }
};

inline Bytes named(const std::string& name, const Bytes& feature) { return Message().text(1, name).data(2, feature).bytes; }
