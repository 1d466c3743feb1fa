// A set of int64 ids: open addressing, linear probing, eight bytes per slot, at most three quarters full. Not thread safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "monolith/hash.h"

namespace monolith {

class IdSet {
 public:
  // expected: ids to make room for when the first one comes; nothing is allocated before that.
  explicit IdSet(std::size_t expected = 0) noexcept : expected_(expected) {}

  // True if the id is new. On std::bad_alloc the set is unchanged. The home slot uses the low bits of the hash.
  bool insert(std::int64_t id, std::uint64_t hash) {
    if (id == kEmpty) {
      size_ += !has_empty_;
      return !std::exchange(has_empty_, true);
    }
    if (slots_ == nullptr) reserve(expected_);
    std::size_t at = hash & mask_;
    for (; slots_[at] != kEmpty; at = (at + 1) & mask_) {
      if (slots_[at] == id) return false;
    }
    if (!fits(size_ + 1, mask_ + 1)) {
      resize((mask_ + 1) * 2);
      at = free_slot(hash);
    }
    slots_[at] = id;
    ++size_;
    return true;
  }

  void prefetch(std::uint64_t hash) const noexcept { __builtin_prefetch(slots_.get() + (hash & mask_), 1); }

  // Makes room for n ids in total. On std::bad_alloc the set is unchanged.
  void reserve(std::size_t n) {
    std::size_t slots = slots_ == nullptr ? kFirstSlots : mask_ + 1;
    while (!fits(n, slots)) slots *= 2;
    if (slots_ == nullptr || slots != mask_ + 1) resize(slots);
  }

  // Writes every id to out[0 .. size()) and returns the end. out[size()] may be overwritten too: storing every slot and advancing
  // only past ids avoids a branch per slot that the CPU cannot predict.
  std::int64_t* copy_to(std::int64_t* out) const noexcept {
    if (has_empty_) *out++ = kEmpty;
    if (slots_ == nullptr) return out;
    for (std::size_t i = 0; i <= mask_; ++i) {
      *out = slots_[i];
      out += slots_[i] != kEmpty;
    }
    return out;
  }

  // Forgets every id and keeps the memory.
  void clear() noexcept {
    if (slots_ != nullptr) std::fill_n(slots_.get(), mask_ + 1, kEmpty);
    has_empty_ = false;
    size_ = 0;
  }

  std::size_t size() const noexcept { return size_; }
  std::size_t bytes() const noexcept { return slots_ == nullptr ? 0 : (mask_ + 1) * sizeof(std::int64_t); }

 private:
  // Marks a free slot; the id of the same value is kept in has_empty_ instead.
  static constexpr std::int64_t kEmpty = 0;
  static constexpr std::size_t kFirstSlots = 8;

  static bool fits(std::size_t ids, std::size_t slots) noexcept { return ids * 4 <= slots * 3; }

  std::size_t free_slot(std::uint64_t hash) const noexcept {
    std::size_t at = hash & mask_;
    while (slots_[at] != kEmpty) at = (at + 1) & mask_;
    return at;
  }

  void resize(std::size_t slots) {
    auto old = std::exchange(slots_, std::make_unique<std::int64_t[]>(slots));
    const std::size_t old_slots = old == nullptr ? 0 : mask_ + 1;
    mask_ = slots - 1;
    for (std::size_t i = 0; i < old_slots; ++i) {
      if (old[i] != kEmpty) slots_[free_slot(hash_id(old[i]))] = old[i];
    }
  }

  std::unique_ptr<std::int64_t[]> slots_;
  std::size_t mask_ = 0;
  std::size_t size_ = 0;
  std::size_t expected_;
  bool has_empty_ = false;
};

}  // namespace monolith
