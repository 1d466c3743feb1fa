// Ids made to order: the id whose hash is a given number, so that a test can put ids where it wants them in any table.
#pragma once

#include <cstdint>

#include "monolith/hash.h"

inline constexpr std::int64_t id_with_hash(std::uint64_t hash) noexcept {
  std::uint64_t x = hash;
  x = x ^ (x >> 31) ^ (x >> 62);
  x *= 0x319642B2D24D8EC3ull;
  x = x ^ (x >> 27) ^ (x >> 54);
  x *= 0x96DE1B173F119089ull;
  x = x ^ (x >> 30) ^ (x >> 60);
  return static_cast<std::int64_t>(x - 0x9E3779B97F4A7C15ull);
}

static_assert(monolith::hash_id(id_with_hash(0x0123456789ABCDEFull)) == 0x0123456789ABCDEFull);
