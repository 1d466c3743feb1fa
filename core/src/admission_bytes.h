// The envelope of a saved admission filter: magic, version, kind, total length, body, CRC-32C. All little endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "monolith/crc32c.h"
#include "monolith/error.h"

namespace monolith::admission_bytes {

static_assert(std::endian::native == std::endian::little, "integers are copied in and out as they are in memory");

enum class Kind : std::uint32_t { kSliding = 1, kProbabilistic = 2 };

inline constexpr std::uint64_t kMagic = 0x544D44414F4E4F4Dull;  // "MONOADMT"
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::size_t kEnvelope = 8 + 4 + 4 + 8 + 4;

class Writer {
 public:
  Writer(Kind kind, std::size_t body_bytes) {
    bytes_.reserve(kEnvelope + body_bytes);
    put(kMagic);
    put(kVersion);
    put(static_cast<std::uint32_t>(kind));
    put(std::uint64_t{kEnvelope + body_bytes});
  }

  template <typename T>
  void put(T value) {
    static_assert(std::is_integral_v<T>);
    put_bytes(&value, sizeof(value));
  }

  void put_bytes(const void* data, std::size_t n) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + n);
  }

  std::vector<std::byte> finish() && {
    put(crc32c::value(bytes_.data(), bytes_.size()));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

[[noreturn]] inline void corrupt(const std::string& what) {
  throw CorruptFile("admission filter: " + what + "; restore from an older checkpoint or start with an empty filter");
}

// Reads a body whose checksum is already known to be right; running off its end means the writer had other parameters.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, Kind kind) : rest_(bytes) {
    if (bytes.size() < kEnvelope) corrupt("saved state has " + std::to_string(bytes.size()) + " bytes, too few");
    if (get<std::uint64_t>() != kMagic) corrupt("saved state does not start with MONOADMT");
    const auto version = get<std::uint32_t>();
    if (version != kVersion) {
      corrupt("saved state has version " + std::to_string(version) + ", this build reads " + std::to_string(kVersion));
    }
    const auto saved_kind = get<std::uint32_t>();
    const auto length = get<std::uint64_t>();
    if (length != bytes.size()) {
      corrupt("saved state has " + std::to_string(bytes.size()) + " bytes, its header says " + std::to_string(length));
    }
    std::uint32_t crc;
    std::memcpy(&crc, bytes.data() + bytes.size() - sizeof(crc), sizeof(crc));
    if (crc != crc32c::value(bytes.data(), bytes.size() - sizeof(crc))) corrupt("saved state fails its checksum");
    rest_ = rest_.first(rest_.size() - sizeof(crc));
    expect("kind (1 sliding, 2 probabilistic)", saved_kind, static_cast<std::uint32_t>(kind));
  }

  template <typename T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }

  std::span<const std::byte> take(std::size_t n) {
    if (n > rest_.size()) {
      corrupt("saved state ends early: " + std::to_string(rest_.size()) + " bytes left, " + std::to_string(n) + " expected");
    }
    const auto taken = rest_.first(n);
    rest_ = rest_.subspan(n);
    return taken;
  }

  static void expect(const char* field, std::uint64_t saved, std::uint64_t here) {
    if (saved == here) return;
    throw CorruptFile(std::string("admission filter: saved with ") + field + " " + std::to_string(saved) +
                      ", this filter has " + std::to_string(here) + "; configure the filter as it was saved");
  }

  void finish() const {
    if (!rest_.empty()) corrupt("saved state has " + std::to_string(rest_.size()) + " bytes too many");
  }

 private:
  std::span<const std::byte> rest_;
};

}  // namespace monolith::admission_bytes
