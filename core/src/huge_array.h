// An uninitialised array for random access. Large ones ask for huge pages: with small ones every touch of a cold page costs a page
// fault at first and a TLB miss later, together more than the access itself.
#pragma once

#include <cstddef>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace monolith {

inline constexpr std::size_t kHugeArrayFrom = std::size_t{4} << 20;  // bytes
inline constexpr std::align_val_t kHugeArrayAlignment{std::size_t{2} << 20};

template <typename T>
struct HugeArrayDelete {
  std::size_t bytes = 0;
  void operator()(T* data) const noexcept {
    if (bytes >= kHugeArrayFrom) {
      ::operator delete(data, kHugeArrayAlignment);
    } else {
      ::operator delete(data);
    }
  }
};

template <typename T>
using HugeArray = std::unique_ptr<T[], HugeArrayDelete<T>>;

// Throws std::bad_alloc.
template <typename T>
HugeArray<T> make_huge_array(std::size_t size) {
  static_assert(std::is_trivial_v<T> && alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  if (size > std::numeric_limits<std::ptrdiff_t>::max() / sizeof(T)) throw std::bad_array_new_length();
  const std::size_t bytes = size * sizeof(T);
  void* data = bytes >= kHugeArrayFrom ? ::operator new(bytes, kHugeArrayAlignment) : ::operator new(bytes);
#if defined(__linux__)
  // A hint; refusing it changes nothing but speed.
  if (bytes >= kHugeArrayFrom) static_cast<void>(madvise(data, bytes, MADV_HUGEPAGE));
#endif
  return HugeArray<T>(static_cast<T*>(data), HugeArrayDelete<T>{bytes});
}

}  // namespace monolith
