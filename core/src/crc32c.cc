#include "monolith/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#include "cpu_features.h"

#if defined(__aarch64__)
#include <arm_acle.h>
#endif

namespace monolith::crc32c {
namespace {

static_assert(std::endian::native == std::endian::little, "the word loops below read the stream in little-endian order");

constexpr std::uint32_t kReversedPolynomial = 0x82F63B78u;

// Row k advances the register by one byte followed by k zero bytes, so eight rows consume eight bytes at once.
using ByteTables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr ByteTables make_byte_tables() {
  ByteTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kReversedPolynomial : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFFu];
    }
  }
  return tables;
}

constexpr ByteTables kByteTables = make_byte_tables();

std::uint64_t load_word(const unsigned char* bytes) noexcept {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

#if defined(__x86_64__) || defined(__aarch64__)
#define MONOLITH_HAS_CHECKSUM_INSTRUCTION

// The instruction is not part of the oldest machines of either kind: a function that uses it asks for it, and is only called where
// cpu_features() has found it.
#if defined(__x86_64__)
#define MONOLITH_WITH_INSTRUCTION __attribute__((target("sse4.2,crc32")))
MONOLITH_WITH_INSTRUCTION inline std::uint64_t add_word(std::uint64_t crc, std::uint64_t word) noexcept {
  return __builtin_ia32_crc32di(crc, word);
}
MONOLITH_WITH_INSTRUCTION inline std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) noexcept {
  return __builtin_ia32_crc32qi(crc, byte);
}
#else
#define MONOLITH_WITH_INSTRUCTION __attribute__((target("+crc")))
MONOLITH_WITH_INSTRUCTION inline std::uint64_t add_word(std::uint64_t crc, std::uint64_t word) noexcept {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
MONOLITH_WITH_INSTRUCTION inline std::uint32_t add_byte(std::uint32_t crc, unsigned char byte) noexcept {
  return __crc32cb(crc, byte);
}
#endif

// Advancing a register over zero bytes is linear over GF(2): a 32x32 bit matrix, here expanded to four 256-entry tables.
struct ZeroBlock {
  std::array<std::array<std::uint32_t, 256>, 4> tables{};

  constexpr explicit ZeroBlock(std::size_t bytes) {
    std::array<std::uint32_t, 32> columns{};
    for (std::size_t bit = 0; bit < 32; ++bit) {
      std::uint32_t crc = std::uint32_t{1} << bit;
      for (std::size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kByteTables[0][crc & 0xFFu];
      columns[bit] = crc;
    }
    for (std::size_t part = 0; part < 4; ++part) {
      for (std::size_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = 0;
        for (std::size_t bit = 0; bit < 8; ++bit) {
          if ((byte >> bit & 1u) != 0) crc ^= columns[part * 8 + bit];
        }
        tables[part][byte] = crc;
      }
    }
  }

  std::uint32_t advance(std::uint32_t crc) const noexcept {
    return tables[0][crc & 0xFFu] ^ tables[1][crc >> 8 & 0xFFu] ^ tables[2][crc >> 16 & 0xFFu] ^ tables[3][crc >> 24];
  }
};

constexpr std::size_t kLongBlock = 4096;
constexpr std::size_t kShortBlock = 256;

// The instruction takes 3 cycles but a new one can start every cycle, so three streams run at three times the speed of one.
template <std::size_t kBlock>
MONOLITH_WITH_INSTRUCTION const unsigned char* three_streams(std::uint64_t& crc, const unsigned char* bytes, std::size_t& n,
                                                             const ZeroBlock& zeros) noexcept {
  while (n >= 3 * kBlock) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kBlock; i += 8) {
      crc = add_word(crc, load_word(bytes + i));
      second = add_word(second, load_word(bytes + kBlock + i));
      third = add_word(third, load_word(bytes + 2 * kBlock + i));
    }
    crc = zeros.advance(static_cast<std::uint32_t>(crc)) ^ second;
    crc = zeros.advance(static_cast<std::uint32_t>(crc)) ^ third;
    bytes += 3 * kBlock;
    n -= 3 * kBlock;
  }
  return bytes;
}

MONOLITH_WITH_INSTRUCTION std::uint32_t extend_with_instruction(std::uint32_t crc, const void* data, std::size_t n) noexcept {
  static constexpr ZeroBlock kLongZeros(kLongBlock);
  static constexpr ZeroBlock kShortZeros(kShortBlock);
  const auto* bytes = static_cast<const unsigned char*>(data);
  std::uint64_t state = ~crc;
  bytes = three_streams<kLongBlock>(state, bytes, n, kLongZeros);
  bytes = three_streams<kShortBlock>(state, bytes, n, kShortZeros);
  for (; n >= 8; n -= 8, bytes += 8) state = add_word(state, load_word(bytes));
  auto tail = static_cast<std::uint32_t>(state);
  for (; n > 0; --n, ++bytes) tail = add_byte(tail, *bytes);
  return ~tail;
}

#endif

// The product of two polynomials over GF(2) modulo that of the checksum. As in a checksum, the highest bit is the coefficient of
// 1, the next that of x, and so on.
std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t bit = std::uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) product ^= b;
    b = (b >> 1) ^ ((b & 1u) != 0 ? kReversedPolynomial : 0u);
  }
  return product;
}

using Extend = std::uint32_t (*)(std::uint32_t, const void*, std::size_t) noexcept;

Extend choose() noexcept {
#if defined(MONOLITH_HAS_CHECKSUM_INSTRUCTION)
  if (cpu_features().crc32c) return extend_with_instruction;
#endif
  return extend_portable;
}

}  // namespace

std::uint32_t extend_portable(std::uint32_t crc, const void* data, std::size_t n) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; n >= 8; n -= 8, bytes += 8) {
    const std::uint64_t word = load_word(bytes) ^ crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kByteTables[7 - k][word >> (8 * k) & 0xFFu];
  }
  for (; n > 0; --n, ++bytes) crc = (crc >> 8) ^ kByteTables[0][(crc ^ *bytes) & 0xFFu];
  return ~crc;
}

std::uint32_t combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) noexcept {
  // Bytes that follow multiply the first part by x^8 each; the inversions at both ends of a checksum cancel out.
  std::uint32_t power = std::uint32_t{1} << 23;
  for (; second_bytes != 0; second_bytes >>= 1) {
    if ((second_bytes & 1u) != 0) first = multiply(first, power);
    power = multiply(power, power);
  }
  return first ^ second;
}

std::uint32_t extend(std::uint32_t crc, const void* data, std::size_t n) noexcept {
  static const Extend chosen = choose();
  return chosen(crc, data, n);
}

}  // namespace monolith::crc32c
