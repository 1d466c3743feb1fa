// Arrays across the border. In: contiguous CPU arrays (NumPy, torch, anything with DLPack or the buffer protocol), never copied.
// Out: NumPy arrays that own their memory.
#pragma once

#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

template <typename T>
using InVector = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using InMatrix = nanobind::ndarray<const T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;
template <typename T>
using OutVector = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;
template <typename T>
using OutMatrix = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<2>>;

template <typename Array>
auto as_span(const Array& array) {
  return std::span(array.data(), array.size());
}

// Uninitialised memory that becomes a NumPy array without a copy.
template <typename T>
class Buffer {
 public:
  explicit Buffer(std::size_t size) : size_(size), data_(std::make_unique_for_overwrite<T[]>(size)) {}

  std::span<T> span() noexcept { return {data_.get(), size_}; }

  // The first `size` entries.
  OutVector<T> vector(std::size_t size) && {
    T* data = data_.get();
    return OutVector<T>(data, {size}, std::move(*this).owner());
  }
  OutVector<T> vector() && { return std::move(*this).vector(size_); }

  OutMatrix<T> matrix(std::size_t rows, std::size_t columns) && {
    T* data = data_.get();
    return OutMatrix<T>(data, {rows, columns}, std::move(*this).owner());
  }

 private:
  nanobind::capsule owner() && {
    nanobind::capsule owner(data_.get(), [](void* data) noexcept { delete[] static_cast<T*>(data); });
    static_cast<void>(data_.release());
    return owner;
  }

  std::size_t size_;
  std::unique_ptr<T[]> data_;
};

// Something whose memory becomes NumPy arrays without a copy, as long as one of them lives.
template <typename T>
nanobind::capsule keep(std::unique_ptr<T> kept) {
  nanobind::capsule owner(kept.get(), [](void* pointer) noexcept { delete static_cast<T*>(pointer); });
  static_cast<void>(kept.release());
  return owner;
}

template <typename T>
OutVector<T> adopt(std::unique_ptr<std::vector<T>> vector) {
  T* data = vector->data();
  const std::size_t size = vector->size();
  return OutVector<T>(data, {size}, keep(std::move(vector)));
}
