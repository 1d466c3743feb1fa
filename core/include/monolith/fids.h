// Fids, version 2: a 15-bit slot above 48 bits of signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "monolith/hash.h"

namespace monolith {

inline constexpr int kFidSignatureBits = 48;
inline constexpr std::int64_t kFidSlots = std::int64_t{1} << 15;

// An id that carries the slot already stays as it is, one below 2^48 is the signature, any other is hashed to 48 bits.
[[gnu::always_inline]] constexpr std::int64_t fid_of(std::int64_t id, std::int64_t slot) noexcept {
  const std::int64_t high = id >> kFidSignatureBits;
  const std::int64_t prefix = slot << kFidSignatureBits;
  if (high == 0 || high == slot) [[likely]] return id | prefix;
  return static_cast<std::int64_t>(hash_id(id) >> (64 - kFidSignatureBits)) | prefix;
}

// The fids of several columns of equal length, row by row: out[row * columns + c] is that of columns[c][row] in slots[c]. A negative
// slot leaves ids as they are. Throws InvalidArgument if lengths differ or there is no such slot.
void stack_fids(std::span<const std::span<const std::int64_t>> columns, std::span<const std::int64_t> slots,
                std::span<std::int64_t> out);

// The same for ids that are in place, [rows, columns]: one slot for each column, or for each row if `by_row`.
void put_slots(std::span<std::int64_t> ids, std::size_t columns, std::span<const std::int64_t> slots, bool by_row);

}  // namespace monolith
