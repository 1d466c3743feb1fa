// Memory that one process writes and another reads: equal buffers, used in turn. Linux only; elsewhere there is none.
#pragma once

#include <cstddef>
#include <memory>

namespace monolith {

class SharedBuffers {
 public:
  // New memory of `count` buffers of at least `capacity` bytes, and in `descriptor` what to pass to the other process, which the caller
  // closes. Null if the system has no such memory.
  static std::shared_ptr<SharedBuffers> make(std::size_t count, std::size_t capacity, int& descriptor);
  // Memory that another process has made. Null if it is not of `count` buffers, or could shrink: reading it would kill this process.
  static std::shared_ptr<SharedBuffers> of(std::size_t count, int descriptor);

  ~SharedBuffers();
  SharedBuffers(const SharedBuffers&) = delete;
  SharedBuffers& operator=(const SharedBuffers&) = delete;

  std::size_t capacity() const noexcept { return capacity_; }
  std::byte* buffer(std::size_t index) const noexcept { return data_ + index * capacity_; }

 private:
  SharedBuffers(std::byte* data, std::size_t count, std::size_t capacity) noexcept
      : data_(data), size_(count * capacity), capacity_(capacity) {}
  static std::shared_ptr<SharedBuffers> map(std::size_t count, std::size_t capacity, int descriptor);

  std::byte* data_;
  std::size_t size_;
  std::size_t capacity_;
};

}  // namespace monolith
