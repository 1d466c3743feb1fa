#include "arena.h"

#include <algorithm>
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
  const std::size_t alignment = size >= kHugePage ? kHugePage : kAlignment;
  size = round_up(size, alignment);
  if (slabs_.size() == slabs_.capacity()) slabs_.reserve(2 * slabs_.size() + 8);
  auto* base = static_cast<std::byte*>(::operator new(size, std::align_val_t{alignment}));
#if defined(__linux__)
  // Only advice: without huge pages everything works, more slowly.
  if (alignment == kHugePage) static_cast<void>(madvise(base, size, MADV_HUGEPAGE));
#endif
  slabs_.push_back({base, size, 0, alignment});
  total_ += size;
  return slabs_.back();
}

void Arena::release() noexcept {
  const std::lock_guard guard(mutex_);
  for (const Slab& slab : slabs_) ::operator delete(slab.base, std::align_val_t{slab.alignment});
  slabs_.clear();
  total_ = 0;
}

std::size_t Arena::bytes() const noexcept {
  const std::lock_guard guard(mutex_);
  return total_;
}

}  // namespace monolith
