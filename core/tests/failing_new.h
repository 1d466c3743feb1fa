// Makes allocations fail on purpose. The test binary's operator new and mprotect count the allocations of each thread and refuse one
// when told to; malloc and mmap are not touched.
#pragma once

#include <cstdint>
#include <new>

#include "check.h"

namespace failing_new {

// While one lives, allocation number `n` (from 0) of this thread and every later one fails. Do not nest.
class FailFrom {
 public:
  explicit FailFrom(std::int64_t n) noexcept;
  ~FailFrom();
  FailFrom(const FailFrom&) = delete;
  FailFrom& operator=(const FailFrom&) = delete;
};

// While one lives, only allocation number `n` of this thread fails.
class FailOnly {
 public:
  explicit FailOnly(std::int64_t n) noexcept;
  ~FailOnly();
  FailOnly(const FailOnly&) = delete;
  FailOnly& operator=(const FailOnly&) = delete;
};

// Allocations of this thread so far.
std::int64_t allocations() noexcept;

// Runs act(state) on a new state from make() once for each allocation it makes, with that allocation failing, and verify(state)
// after each failure; then once without failure. Returns how many allocations were made to fail, so that a test can insist on
// more than none. `make` returns the state, e.g. a std::unique_ptr; it and `verify` allocate freely.
template <typename Make, typename Act, typename Verify>
std::int64_t each_allocation(Make make, Act act, Verify verify) {
  for (std::int64_t n = 0;; ++n) {
    auto state = make();
    bool failed = false;
    {
      const FailOnly fail(n);
      try {
        act(state);
      } catch (const std::bad_alloc&) {
        failed = true;
      }
    }
    if (!failed) return n;
    verify(state);
  }
}

}  // namespace failing_new
