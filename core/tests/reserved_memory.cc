// Rows never move because their addresses are reserved in advance. Memory that was not zero, or that another reservation
// shared, would be rows of another table.
#include "reserved_memory.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "check.h"

namespace {

using monolith::ReservedMemory;

constexpr std::size_t kMiB = std::size_t{1} << 20;

bool all_zero(const std::byte* from, std::size_t n) {
  return std::all_of(from, from + n, [](std::byte byte) { return byte == std::byte{0}; });
}

}  // namespace

TEST("addresses are aligned to a huge page and as many as asked for at least") {
  for (const std::size_t bytes : {std::size_t{1}, 2 * kMiB, 2 * kMiB + 1, 100 * kMiB}) {
    const ReservedMemory memory(bytes);
    CHECK(memory.size() >= bytes);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(memory.base()) % (2 * kMiB), 0u);
    CHECK_EQ(memory.size() % (2 * kMiB), 0u);
  }
}

TEST("memory is zero, keeps what was written, and grows in place") {
  ReservedMemory memory(16 * kMiB);
  std::byte* const base = memory.base();
  std::size_t before = 0;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, kMiB, 3 * kMiB, 9 * kMiB, 16 * kMiB}) {
    memory.commit(bytes);
    CHECK(memory.base() == base);
    CHECK(all_zero(base + before, bytes - before));
    for (std::size_t i = 0; i < before; i += 997) REQUIRE(base[i] == std::byte{0x5a});
    std::fill(base + before, base + bytes, std::byte{0x5a});
    before = bytes;
  }
}

TEST("asking again for what is there changes nothing") {
  ReservedMemory memory(4 * kMiB);
  memory.commit(kMiB);
  memory.base()[kMiB - 1] = std::byte{7};
  memory.commit(10);
  memory.commit(kMiB);
  CHECK(memory.base()[kMiB - 1] == std::byte{7});
}

TEST("more than was reserved is refused, and what is there stays") {
  ReservedMemory memory(2 * kMiB);
  memory.commit(100);
  memory.base()[99] = std::byte{9};
  CHECK_THROWS(memory.commit(memory.size() + 1), std::bad_alloc);
  CHECK(memory.base()[99] == std::byte{9});
  memory.commit(memory.size());
  CHECK(memory.base()[99] == std::byte{9});
}

TEST("what was dropped is zero again at the same addresses") {
  ReservedMemory memory(8 * kMiB);
  memory.drop();  // of nothing
  memory.commit(3 * kMiB);
  std::byte* const base = memory.base();
  std::fill(base, base + 3 * kMiB, std::byte{1});
  memory.drop();
  CHECK(memory.base() == base);
  memory.commit(4 * kMiB);
  CHECK(all_zero(base, 4 * kMiB));
}

TEST("reservations do not overlap, and one that moved is the same") {
  std::vector<ReservedMemory> all;
  for (int i = 0; i < 8; ++i) all.emplace_back(4 * kMiB);
  for (ReservedMemory& memory : all) memory.commit(4 * kMiB);
  for (std::size_t i = 0; i < all.size(); ++i) std::fill_n(all[i].base(), 4 * kMiB, static_cast<std::byte>(i + 1));
  for (std::size_t i = 0; i < all.size(); ++i) {
    REQUIRE(all[i].base()[0] == static_cast<std::byte>(i + 1));
    REQUIRE(all[i].base()[4 * kMiB - 1] == static_cast<std::byte>(i + 1));
  }
  std::byte* const base = all[3].base();
  ReservedMemory moved = std::move(all[3]);
  CHECK(moved.base() == base);
  CHECK(moved.base()[17] == std::byte{4});
  ReservedMemory assigned;
  CHECK_EQ(assigned.size(), 0u);
  assigned = std::move(moved);
  CHECK(assigned.base() == base);
}

TEST("where addresses are few, less is taken") {
  // No machine has these many; a quarter of a quarter is tried until one fits.
  const ReservedMemory memory = ReservedMemory::at_most(std::size_t{1} << 60, kMiB);
  CHECK(memory.size() >= kMiB);
  CHECK(memory.size() < std::size_t{1} << 60);
  CHECK_THROWS(ReservedMemory::at_most(std::size_t{1} << 60, std::size_t{1} << 59), std::bad_alloc);
}

TEST("the memory of a small use is counted in small pages, of a large one in huge pages") {
  CHECK_EQ(ReservedMemory::bytes_for(0), 0u);
  CHECK_EQ(ReservedMemory::bytes_for(1), 4096u);
  CHECK_EQ(ReservedMemory::bytes_for(4097), 8192u);
  CHECK_EQ(ReservedMemory::bytes_for(2 * kMiB), 2 * kMiB);
  CHECK_EQ(ReservedMemory::bytes_for(2 * kMiB + 1), 4 * kMiB);
}
