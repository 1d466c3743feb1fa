// Every file ends in these checksums: a wrong one would make good files unreadable elsewhere, or damaged ones readable.
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/crc32c.h"

namespace crc32c = monolith::crc32c;

TEST("published values") {
  // RFC 3720 appendix B.4, and the check value of the CRC catalogue.
  CHECK_EQ(crc32c::value("123456789", 9), 0xE3069283u);
  CHECK_EQ(crc32c::value("", 0), 0u);
  CHECK_EQ(crc32c::value(nullptr, 0), 0u);
  std::vector<unsigned char> bytes(32, 0);
  CHECK_EQ(crc32c::value(bytes.data(), bytes.size()), 0x8A9136AAu);
  bytes.assign(32, 0xFF);
  CHECK_EQ(crc32c::value(bytes.data(), bytes.size()), 0x62A8AB43u);
  for (unsigned i = 0; i < 32; ++i) bytes[i] = static_cast<unsigned char>(i);
  CHECK_EQ(crc32c::value(bytes.data(), bytes.size()), 0x46DD794Eu);
}

TEST("the chosen implementation equals bit-by-bit division, at every length, offset and split") {
  std::mt19937_64 random(7);
  std::vector<unsigned char> bytes(70000);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  std::vector<std::uint32_t> expected(bytes.size() + 1);
  std::uint32_t state = ~0u;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    expected[i] = ~state;
    state ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1u) != 0 ? 0x82F63B78u : 0u);
  }
  expected[bytes.size()] = ~state;

  for (std::size_t n = 0; n < 2000; ++n) {
    CHECK_EQ(crc32c::value(bytes.data(), n), expected[n]);
    CHECK_EQ(crc32c::extend_portable(0, bytes.data(), n), expected[n]);
  }
  // Around the borders of the interleaved blocks (3 x 256 and 3 x 4096), and long enough to use both.
  for (std::size_t n : {767u, 768u, 769u, 12287u, 12288u, 12289u, 13055u, 13056u, 13063u, 24576u, 40000u, 69999u, 70000u}) {
    CHECK_EQ(crc32c::value(bytes.data(), n), expected[n]);
    CHECK_EQ(crc32c::extend_portable(0, bytes.data(), n), expected[n]);
  }
  for (int i = 0; i < 2000; ++i) {
    const std::size_t end = random() % (bytes.size() + 1);
    const std::size_t cut = random() % (end + 1);
    CHECK_EQ(crc32c::extend(expected[cut], bytes.data() + cut, end - cut), expected[end]);
    CHECK_EQ(crc32c::extend_portable(expected[cut], bytes.data() + cut, end - cut), expected[end]);
  }
}

TEST("the checksum of a whole follows from those of its parts") {
  std::mt19937_64 random(8);
  std::vector<unsigned char> bytes(70000);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (int i = 0; i < 2000; ++i) {
    const std::size_t end = i < 20 ? static_cast<std::size_t>(i) : random() % (bytes.size() + 1);
    const std::size_t cut = random() % (end + 1);
    const std::uint32_t first = crc32c::value(bytes.data(), cut);
    const std::uint32_t second = crc32c::value(bytes.data() + cut, end - cut);
    CHECK_EQ(crc32c::combine(first, second, end - cut), crc32c::value(bytes.data(), end));
  }
}
