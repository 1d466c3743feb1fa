// Starting to fetch memory before it is needed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace monolith {

// Into the second cache, not the first. It takes two neighbouring lines in the time of one; and the first can wait for some twenty
// lines only, which, taken up by lines that come from memory, are not there for those that come from the second.
//
// Inlined by force: GCC takes a function that only prefetches for one without effect and drops the call.
[[gnu::always_inline]] inline void fetch(const void* line) noexcept { __builtin_prefetch(line, 0, 2); }

[[gnu::always_inline]] inline void fetch_lines(const std::byte* first, std::uint32_t lines, std::size_t line_bytes = 64) noexcept {
  for (std::uint32_t line = 0; line < lines; ++line) fetch(first + line * line_bytes);
}

}  // namespace monolith
