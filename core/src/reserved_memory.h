// A range of addresses that is taken at once and filled with memory from the front, as it is needed: what lies in it never moves, and
// finding a place in it takes no table. Move-only; not thread-safe.
#pragma once

#include <cstddef>
#include <utility>

namespace monolith {

class ReservedMemory {
 public:
  ReservedMemory() = default;
  // Takes addresses, no memory; base() is aligned to a huge page. Throws std::bad_alloc.
  explicit ReservedMemory(std::size_t bytes);
  // The same, but where addresses are limited (ulimit -v) perhaps for fewer, at least for `least`.
  static ReservedMemory at_most(std::size_t bytes, std::size_t least);
  ReservedMemory(ReservedMemory&& other) noexcept { swap(other); }
  ReservedMemory& operator=(ReservedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ReservedMemory();

  std::byte* base() const noexcept { return base_; }
  std::size_t size() const noexcept { return size_; }

  // The first `bytes` may be used from now on; they are zero at first. Throws std::bad_alloc, changing nothing.
  void commit(std::size_t bytes) {
    if (bytes > committed_) [[unlikely]] grow(bytes);
  }
  // Gives the memory back and keeps the addresses.
  void drop() noexcept;

  // The memory that is taken when the first `used` bytes have been touched.
  static std::size_t bytes_for(std::size_t used) noexcept;

 private:
  void grow(std::size_t bytes);
  void swap(ReservedMemory& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    std::swap(committed_, other.committed_);
  }

  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  std::size_t committed_ = 0;
};

}  // namespace monolith
