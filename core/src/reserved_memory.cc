#include "reserved_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace monolith {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kPage = std::size_t{4} << 10;
constexpr std::size_t kSmallestStep = std::size_t{64} << 10;  // a multiple of every machine's small pages
constexpr std::size_t kLargestStep = std::size_t{32} << 20;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

ReservedMemory::ReservedMemory(std::size_t bytes) {
  const std::size_t size = round_up(bytes, kHugePage);
  void* const taken = mmap(nullptr, size + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (taken == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(taken);
  auto* const base = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage));
  if (base != begin) munmap(begin, static_cast<std::size_t>(base - begin));
  munmap(base + size, static_cast<std::size_t>(begin + kHugePage - base));
  base_ = base;
  size_ = size;
}

ReservedMemory ReservedMemory::at_most(std::size_t bytes, std::size_t least) {
  for (;; bytes = std::max(bytes / 4, least)) {
    try {
      return ReservedMemory(bytes);
    } catch (const std::bad_alloc&) {
      if (bytes <= least) throw;
    }
  }
}

ReservedMemory::~ReservedMemory() {
  if (base_ != nullptr) munmap(base_, size_);
}

void ReservedMemory::grow(std::size_t bytes) {
  // A sixteenth of what is there: few calls for a large table. What is not touched takes no memory.
  const std::size_t wanted = std::max(bytes, committed_ + std::min(committed_ / 16, kLargestStep));
  const std::size_t end = std::min(round_up(wanted, wanted > kHugePage ? kHugePage : kSmallestStep), size_);
  if (bytes > end || mprotect(base_ + committed_, end - committed_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  // The first one is left to small pages, so that a small table takes little. Only advice: without huge pages everything works,
  // more slowly.
  const std::size_t from = std::max(committed_, kHugePage);
  if (end > from) static_cast<void>(madvise(base_ + from, end - from, MADV_HUGEPAGE));
#endif
  committed_ = end;
}

void ReservedMemory::drop() noexcept {
  if (committed_ == 0) return;
  // If the system cannot do even this, the memory stays and is used again.
  if (mmap(base_, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) committed_ = 0;
}

std::size_t ReservedMemory::bytes_for(std::size_t used) noexcept { return round_up(used, used > kHugePage ? kHugePage : kPage); }

}  // namespace monolith
