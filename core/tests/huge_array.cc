// Scratch memory of the large kernels. It is freed by another function when it is large, and given to the wrong one it would
// damage the heap; an overflow in its size would be an array of a few bytes.
#include "huge_array.h"

#include <cstdint>
#include <limits>
#include <new>
#include <utility>

#include "check.h"
#include "failing_new.h"

using monolith::kHugeArrayFrom;
using monolith::make_huge_array;

TEST("small and large arrays can be written from end to end") {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{8}, std::size_t{4096}, kHugeArrayFrom - 8, kHugeArrayFrom, 3 * kHugeArrayFrom}) {
    const std::size_t size = bytes / 8;
    auto array = make_huge_array<std::uint64_t>(size);
    for (std::size_t i = 0; i < size; i += 511) array[i] = i;
    if (size > 0) array[size - 1] = size - 1;
    for (std::size_t i = 0; i < size; i += 511) REQUIRE(array[i] == i);
  }
}

TEST("large arrays begin at a huge page") {
  const auto large = make_huge_array<std::uint8_t>(kHugeArrayFrom);
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(large.get()) % (std::size_t{2} << 20), 0u);
}

TEST("an array that moved is freed once, by the right function") {
  for (const std::size_t size : {std::size_t{100}, kHugeArrayFrom}) {
    auto first = make_huge_array<std::uint8_t>(size);
    first[size - 1] = 7;
    auto second = std::move(first);
    CHECK(first == nullptr);
    CHECK_EQ(static_cast<int>(second[size - 1]), 7);
    first = make_huge_array<std::uint8_t>(size == 100 ? kHugeArrayFrom : 100);
    first = std::move(second);
    CHECK_EQ(static_cast<int>(first[size - 1]), 7);
  }
}

TEST("sizes that no memory has are refused, not wrapped around") {
  CHECK_THROWS(make_huge_array<std::uint64_t>(std::numeric_limits<std::size_t>::max()), std::bad_alloc);
  CHECK_THROWS(make_huge_array<std::uint64_t>(std::numeric_limits<std::size_t>::max() / 8 + 2), std::bad_alloc);
  CHECK_THROWS(make_huge_array<std::uint32_t>((std::size_t{1} << 62) + 1), std::bad_alloc);
}

TEST("an allocation that fails throws and leaks nothing") {
  for (const std::size_t size : {std::size_t{100}, kHugeArrayFrom}) {
    const failing_new::FailOnly fail(0);
    CHECK_THROWS(make_huge_array<std::uint8_t>(size), std::bad_alloc);
  }
}
