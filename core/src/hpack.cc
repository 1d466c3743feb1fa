#include "monolith/hpack.h"

#include <array>
#include <utility>

namespace monolith {
namespace {

using Bytes = std::span<const std::uint8_t>;

// Bits of the code of each byte, and of the end (RFC 7541, appendix B). Codes of one length are consecutive, in the order of the
// bytes, and follow those of the length before, so the lengths say everything.
constexpr std::uint8_t kHuffmanLengths[] = {
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28,
    28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7,
    6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24,
    23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22,
    23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, 26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27,
    26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25,
    24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30};

// RFC 7541, appendix A. The first has the index 1.
constexpr std::pair<std::string_view, std::string_view> kStaticTable[] = {
    {":authority", ""}, {":method", "GET"}, {":method", "POST"}, {":path", "/"}, {":path", "/index.html"}, {":scheme", "http"},
    {":scheme", "https"}, {":status", "200"}, {":status", "204"}, {":status", "206"}, {":status", "304"}, {":status", "400"},
    {":status", "404"}, {":status", "500"}, {"accept-charset", ""}, {"accept-encoding", "gzip, deflate"},
    {"accept-language", ""}, {"accept-ranges", ""}, {"accept", ""}, {"access-control-allow-origin", ""}, {"age", ""},
    {"allow", ""}, {"authorization", ""}, {"cache-control", ""}, {"content-disposition", ""}, {"content-encoding", ""},
    {"content-language", ""}, {"content-length", ""}, {"content-location", ""}, {"content-range", ""}, {"content-type", ""},
    {"cookie", ""}, {"date", ""}, {"etag", ""}, {"expect", ""}, {"expires", ""}, {"from", ""}, {"host", ""}, {"if-match", ""},
    {"if-modified-since", ""}, {"if-none-match", ""}, {"if-range", ""}, {"if-unmodified-since", ""}, {"last-modified", ""},
    {"link", ""}, {"location", ""}, {"max-forwards", ""}, {"proxy-authenticate", ""}, {"proxy-authorization", ""},
    {"range", ""}, {"referer", ""}, {"refresh", ""}, {"retry-after", ""}, {"server", ""}, {"set-cookie", ""},
    {"strict-transport-security", ""}, {"transfer-encoding", ""}, {"user-agent", ""}, {"vary", ""}, {"via", ""},
    {"www-authenticate", ""}};

constexpr std::size_t kStatic = std::size(kStaticTable), kSymbols = std::size(kHuffmanLengths), kEnd = kSymbols - 1;
constexpr unsigned kLongest = 30;

struct Huffman {
  std::array<std::uint32_t, kLongest + 1> first{}, count{}, start{};  // of each length: its first code, codes, place in `symbols`
  std::array<std::uint16_t, kSymbols> symbols{};
};

constexpr Huffman make_huffman() {
  Huffman made;
  std::uint32_t code = 0, place = 0;
  for (unsigned length = 1; length <= kLongest; ++length) {
    code <<= 1;
    made.first[length] = code;
    made.start[length] = place;
    for (std::size_t symbol = 0; symbol < kSymbols; ++symbol) {
      if (kHuffmanLengths[symbol] == length) made.symbols[place++] = static_cast<std::uint16_t>(symbol);
    }
    made.count[length] = place - made.start[length];
    code += made.count[length];
  }
  return made;
}

constexpr Huffman kHuffman = make_huffman();
static_assert(kSymbols == 257 && kStatic == 61);
static_assert(kHuffman.first[kLongest] + kHuffman.count[kLongest] == 1u << kLongest, "every sequence of bits has a code in it");

void append_huffman(Bytes coded, std::string& text) {
  std::uint32_t code = 0;
  unsigned length = 0;
  for (const std::uint8_t byte : coded) {
    for (int bit = 7; bit >= 0; --bit) {
      code = code << 1 | (byte >> bit & 1u);
      ++length;
      const std::uint32_t offset = code - kHuffman.first[length];
      if (code < kHuffman.first[length] || offset >= kHuffman.count[length]) continue;
      const std::uint16_t symbol = kHuffman.symbols[kHuffman.start[length] + offset];
      if (symbol == kEnd) throw HpackError{};
      text.push_back(static_cast<char>(symbol));
      code = 0;
      length = 0;
    }
  }
  // What is left over are the first bits of the end, less than a byte of them.
  if (length > 7 || code != (1u << length) - 1) throw HpackError{};
}

// As the table and limits count it.
std::size_t field_bytes(std::string_view name, std::string_view value) { return name.size() + value.size() + 32; }

class BlockReader {
 public:
  explicit BlockReader(Bytes block) : left_(block) {}

  bool done() const { return left_.empty(); }
  std::uint8_t peek() const { return left_.front(); }

  // The number in the low `bits` of the next byte and, if these are all set, in those after it.
  std::uint64_t integer(unsigned bits) {
    const std::uint64_t most = (1u << bits) - 1;
    std::uint64_t value = byte() & most;
    if (value < most) return value;
    for (unsigned shift = 0; shift <= 21; shift += 7) {
      const std::uint8_t next = byte();
      value += static_cast<std::uint64_t>(next & 0x7f) << shift;
      if (next < 0x80) return value;
    }
    throw HpackError{};  // longer than any block may be
  }

  std::string string() {
    if (done()) throw HpackError{};
    const bool coded = (peek() & 0x80) != 0;
    const std::uint64_t size = integer(7);
    if (size > left_.size()) throw HpackError{};
    const Bytes bytes = left_.first(static_cast<std::size_t>(size));
    left_ = left_.subspan(bytes.size());
    std::string text;
    if (coded) {
      append_huffman(bytes, text);
    } else {
      text.assign(bytes.begin(), bytes.end());
    }
    return text;
  }

 private:
  std::uint8_t byte() {
    if (done()) throw HpackError{};
    const std::uint8_t value = left_.front();
    left_ = left_.subspan(1);
    return value;
  }

  Bytes left_;
};

void append_integer(std::size_t value, unsigned bits, std::string& block) {
  const std::size_t most = (std::size_t{1} << bits) - 1;
  if (value < most) {
    block.push_back(static_cast<char>(value));
    return;
  }
  block.push_back(static_cast<char>(most));
  for (value -= most; value >= 0x80; value >>= 7) block.push_back(static_cast<char>(value | 0x80));
  block.push_back(static_cast<char>(value));
}

}  // namespace

bool HpackDecoder::decode(Bytes block, std::size_t max_bytes, std::vector<HeaderField>& fields) {
  BlockReader reader(block);
  std::size_t bytes = 0;
  const auto found = [&](std::string_view name, std::string_view value) {
    bytes += field_bytes(name, value);
    if (bytes <= max_bytes) fields.push_back({std::string(name), std::string(value)});
  };
  bool may_resize = true;
  while (!reader.done()) {
    const std::uint8_t first = reader.peek();
    if ((first & 0xe0) == 0x20) {
      if (!may_resize) throw HpackError{};
      set_limit(reader.integer(5));
      continue;
    }
    may_resize = false;
    if ((first & 0x80) != 0) {
      const std::uint64_t index = reader.integer(7);
      if (index - 1 < kStatic) {
        found(kStaticTable[index - 1].first, kStaticTable[index - 1].second);
      } else {
        found(at(index).name, at(index).value);
      }
      continue;
    }
    const bool is_kept = (first & 0x40) != 0;
    const std::uint64_t name = reader.integer(is_kept ? 6 : 4);
    HeaderField field;
    if (name == 0) {
      field.name = reader.string();
    } else {
      field.name = name <= kStatic ? std::string(kStaticTable[name - 1].first) : at(name).name;
    }
    field.value = reader.string();
    found(field.name, field.value);
    if (is_kept) insert(std::move(field));
  }
  return bytes <= max_bytes;
}

const HeaderField& HpackDecoder::at(std::uint64_t index) const {
  if (index <= kStatic || index - kStatic > table_.size()) throw HpackError{};
  return table_[static_cast<std::size_t>(index - kStatic - 1)];
}

void HpackDecoder::insert(HeaderField field) {
  bytes_ += field_bytes(field.name, field.value);
  table_.push_front(std::move(field));
  set_limit(limit_);
}

void HpackDecoder::set_limit(std::uint64_t limit) {
  if (limit > most_) throw HpackError{};
  limit_ = static_cast<std::size_t>(limit);
  while (bytes_ > limit_) {
    bytes_ -= field_bytes(table_.back().name, table_.back().value);
    table_.pop_back();
  }
}

void encode_field(std::string_view name, std::string_view value, std::string& block) {
  block.push_back('\0');
  append_integer(name.size(), 7, block);
  block.append(name);
  append_integer(value.size(), 7, block);
  block.append(value);
}

}  // namespace monolith
