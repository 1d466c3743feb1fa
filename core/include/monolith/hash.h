// The one hash of the project. Sub-tables, admission filters, touched sets and shard owners all derive from it, and files
// depend on it: its values are pinned by golden tests and may only change together with the table file version.
#pragma once

#include <cstdint>

namespace monolith {

// A bijection of 64-bit integers (xor-shift-multiply, three rounds) whose every output bit depends on every input bit, so
// sequential ids, slot-prefixed ids and ids with only high bits set all spread evenly.
[[gnu::always_inline]] constexpr std::uint64_t hash_id(std::int64_t id) noexcept {
  std::uint64_t x = static_cast<std::uint64_t>(id) + 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Maps a hash to [0, n) by its high bits, without a division. n must be > 0.
[[gnu::always_inline]] constexpr std::uint64_t fast_range(std::uint64_t hash, std::uint64_t n) noexcept {
  return static_cast<std::uint64_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
}

}  // namespace monolith
