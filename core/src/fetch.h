// Starting to fetch memory before it is needed.
//
// A fetch is done with when the page of its address has been found, which for a table of gigabytes takes a walk through page tables
// in memory, and no instruction is done with before those in front of it. An update, with much to do between two addresses, makes the
// addresses of many first, and then fetches in a loop that does nothing else: as many walks go on at once as the processor can do. A
// lookup has little to do in between, and spreads its fetches: the first cache has few places for lines on their way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monolith {

// Both are inlined by force: GCC takes a function that only prefetches for one without effect and drops the call.

// Into the first cache.
[[gnu::always_inline]] inline void fetch_near(const void* line) noexcept { __builtin_prefetch(line, 0, 3); }

// Into the second cache. It takes two neighbouring lines in the time of one, and more of them at once. But it is only a hint: after
// some milliseconds in which many of the lines were in a cache, as when popular rows are read again and again, a Zen 4 processor was
// seen to be as slow as without it. Beside updates that was not seen.
[[gnu::always_inline]] inline void fetch(const void* line) noexcept { __builtin_prefetch(line, 0, 2); }

[[gnu::always_inline]] inline void fetch_lines(const std::byte* first, std::uint32_t lines, std::size_t line_bytes = 64) noexcept {
  for (std::uint32_t line = 0; line < lines; ++line) fetch(first + line * line_bytes);
}

// yes ? a : b without a branch. The compiler would make one, and where it cannot be predicted each wrong guess throws away what is
// being fetched behind it.
[[gnu::always_inline]] inline std::byte* choose(bool yes, const void* a, const void* b) noexcept {
  const auto other = reinterpret_cast<std::uintptr_t>(b);
  const auto difference = reinterpret_cast<std::uintptr_t>(a) ^ other;
  return reinterpret_cast<std::byte*>(other ^ (difference & (std::uintptr_t{0} - yes)));
}

}  // namespace monolith
