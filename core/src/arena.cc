#include "arena.h"

#include <algorithm>
#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace monolith {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallestSlab = std::size_t{64} << 10;
constexpr std::size_t kLargestSlab = std::size_t{32} << 20;
// How many of the newest slabs are searched for room, so that the end of a slab too short for a row chunk still takes blocks.
constexpr std::size_t kSearched = 4;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

std::byte* take_heap(std::size_t size) {
  return static_cast<std::byte*>(::operator new(size, std::align_val_t{Arena::kAlignment}));
}
void give_heap(std::byte* base) noexcept { ::operator delete(base, std::align_val_t{Arena::kAlignment}); }

#if defined(__linux__)
// Slabs from this size on come from the system, not from the heap. The heap would hardly give them back, and memory that it has had
// before lies on small pages for ever.
constexpr std::size_t kMappedFrom = std::size_t{256} << 10;
constexpr std::size_t kPage = std::size_t{4} << 10;

constexpr std::size_t granule(std::size_t size) { return size >= kHugePage ? kHugePage : size >= kMappedFrom ? kPage : Arena::kAlignment; }

std::byte* take(std::size_t size) {
  if (size < kMappedFrom) return take_heap(size);
  const std::size_t spare = size >= kHugePage ? kHugePage : 0;
  void* const taken = mmap(nullptr, size + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (taken == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(taken);
  if (spare == 0) return begin;
  auto* const base = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<std::uintptr_t>(begin), kHugePage));
  if (base != begin) munmap(begin, static_cast<std::size_t>(base - begin));
  munmap(base + size, static_cast<std::size_t>(begin + spare - base));
  // Only advice: without huge pages everything works, more slowly.
  static_cast<void>(madvise(base, size, MADV_HUGEPAGE));
  return base;
}

void give_back(std::byte* base, std::size_t size) noexcept {
  if (size < kMappedFrom) return give_heap(base);
  munmap(base, size);
}
#else
constexpr std::size_t granule(std::size_t) { return Arena::kAlignment; }
std::byte* take(std::size_t size) { return take_heap(size); }
void give_back(std::byte* base, std::size_t) noexcept { give_heap(base); }
#endif

}  // namespace

std::byte* Arena::allocate(std::size_t bytes) {
  bytes = round_up(bytes, kAlignment);
  const std::lock_guard guard(mutex_);
  const std::size_t oldest = slabs_.size() > kSearched ? slabs_.size() - kSearched : 0;
  for (std::size_t i = oldest; i < slabs_.size(); ++i) {
    Slab& slab = slabs_[i];
    if (slab.size - slab.used < bytes) continue;
    std::byte* piece = slab.base + slab.used;
    slab.used += bytes;
    return piece;
  }
  // A sixteenth of what is there: few slabs for a large table, little waste for a small one.
  Slab& slab = add_slab(std::max(bytes, std::clamp(total_ / 16, kSmallestSlab, kLargestSlab)));
  slab.used = bytes;
  return slab.base;
}

void Arena::reserve(std::size_t bytes) {
  const std::lock_guard guard(mutex_);
  add_slab(bytes);
}

Arena::Slab& Arena::add_slab(std::size_t size) {
  size = round_up(size, granule(size));
  if (slabs_.size() == slabs_.capacity()) slabs_.reserve(2 * slabs_.size() + 8);
  slabs_.push_back({take(size), size, 0});
  total_ += size;
  return slabs_.back();
}

void Arena::release() noexcept {
  const std::lock_guard guard(mutex_);
  for (const Slab& slab : slabs_) give_back(slab.base, slab.size);
  slabs_.clear();
  total_ = 0;
}

std::size_t Arena::bytes() const noexcept {
  const std::lock_guard guard(mutex_);
  return total_;
}

}  // namespace monolith
