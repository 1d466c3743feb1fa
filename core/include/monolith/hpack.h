// Header blocks of HTTP/2 (HPACK, RFC 7541): a decoder with Huffman codes and dynamic table, and an encoder that needs neither.
//
// Thread-safety: an HpackDecoder is used by one thread at a time. Ownership: fields own their bytes. Failure: HpackError after which
// the decoder must not be used, because it has another table than the sender; std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace monolith {

struct HeaderField {
  std::string name, value;

  bool operator==(const HeaderField&) const = default;
};

struct HpackError {};

class HpackDecoder {
 public:
  static constexpr std::size_t kTableBytes = 4096;  // what a sender may use that has not been told otherwise

  explicit HpackDecoder(std::size_t table_bytes = kTableBytes) : limit_(table_bytes), most_(table_bytes) {}

  // Appends the fields of a whole block. Returns false if they take more than `max_bytes`, counting 32 for each besides its text: those beyond are left out, but the table
  // is kept as the sender has it.
  bool decode(std::span<const std::uint8_t> block, std::size_t max_bytes, std::vector<HeaderField>& fields);

  std::size_t table_bytes() const { return bytes_; }

 private:
  const HeaderField& at(std::uint64_t index) const;
  void insert(HeaderField field);
  void set_limit(std::uint64_t limit);

  std::deque<HeaderField> table_;  // the newest first
  std::size_t bytes_ = 0, limit_, most_;
};

// Appends a field as a literal that changes no table.
void encode_field(std::string_view name, std::string_view value, std::string& block);

}  // namespace monolith
