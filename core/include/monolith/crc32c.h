// CRC-32C (Castagnoli, polynomial 0x1EDC6F41), the checksum of every file the core writes. The value of "123456789" is
// 0xE3069283, the same as in iSCSI, ext4, RocksDB and Kafka.
//
// Thread-safety: pure functions. Ownership: nothing is kept. Units: bytes. Failure: none; n == 0 is allowed with any pointer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monolith::crc32c {

// The checksum of what `crc` was computed over, followed by n bytes at `data`: extend(value(a), b) == value(a + b).
// Uses the CPU's crc32 instruction, three independent streams at a time, where there is one (decided once, at run time).
std::uint32_t extend(std::uint32_t crc, const void* data, std::size_t n) noexcept;

inline std::uint32_t value(const void* data, std::size_t n) noexcept { return extend(0, data, n); }

// The checksum of a followed by b, from those of a and b and the length of b: combine(value(a), value(b), size of b) ==
// value(a + b). Takes microseconds whatever the length.
std::uint32_t combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_bytes) noexcept;

// The same function as extend() by table lookup only. Public so that tests can hold one implementation against the other.
std::uint32_t extend_portable(std::uint32_t crc, const void* data, std::size_t n) noexcept;

}  // namespace monolith::crc32c
