// Four ids with their row numbers and times: the unit of the index.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace monolith {

// One cache line. Slots fill from the front; row 0 marks an empty one, so zeroed memory is an empty bucket.
struct alignas(64) Bucket {
  static constexpr int kSlots = 4;
  std::int64_t ids[kSlots];
  std::uint32_t rows[kSlots];
  std::uint32_t times[kSlots];

  [[gnu::always_inline]] bool full() const noexcept { return rows[kSlots - 1] != 0; }
  // Free of branches: how many slots are used cannot be predicted.
  [[gnu::always_inline]] int used() const noexcept {
    int slots = 0;
    for (int i = 0; i < kSlots; ++i) slots += rows[i] != 0;
    return slots;
  }
  // One bit per slot that holds the id. An empty slot may hold the id of a removed or moved one, but only behind the live
  // slots, so the lowest bit is the live one if there is any.
  [[gnu::always_inline]] unsigned matches(std::int64_t id) const noexcept {
#if defined(__AVX2__)
    const __m256i here = _mm256_load_si256(reinterpret_cast<const __m256i*>(ids));
    const __m256i equal = _mm256_cmpeq_epi64(here, _mm256_set1_epi64x(id));
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
#else
    unsigned bits = 0;
    for (int i = 0; i < kSlots; ++i) bits |= static_cast<unsigned>(ids[i] == id) << i;
    return bits;
#endif
  }
  // Where an id is: its slot and the number of its row, which is 0 if the id is not in this bucket. Free of branches.
  struct Match {
    std::uint32_t row;
    std::uint32_t slot;
  };
  [[gnu::always_inline]] Match match(std::int64_t id) const noexcept {
    const unsigned bits = matches(id);
    const unsigned slot = static_cast<unsigned>(__builtin_ctz(bits | 1u << (kSlots - 1)));
    return {rows[slot] & (0u - static_cast<unsigned>(bits != 0)), slot};
  }
};
static_assert(sizeof(Bucket) == 64);

// A found or inserted id. Valid until the next insert or erase.
struct BucketSlot {
  Bucket* bucket = nullptr;
  std::uint32_t slot = 0;
  [[gnu::always_inline]] explicit operator bool() const noexcept { return bucket != nullptr; }
  [[gnu::always_inline]] std::uint32_t& row() const noexcept { return bucket->rows[slot]; }
  [[gnu::always_inline]] std::uint32_t& time() const noexcept { return bucket->times[slot]; }
};

// Where an id is, or the free slot in which its search ended. Valid until the next insert or erase.
struct Search {
  BucketSlot slot;
  bool found;
  std::uint64_t entry;  // of the shard's directory
};

}  // namespace monolith
