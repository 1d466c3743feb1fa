// A reader-writer lock for critical sections of microseconds. A waiting writer keeps new readers out, so that a stream of
// lookups cannot starve training. Spins, then yields; never sleeps, so it must not be held across I/O.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace monolith {

class RwLock {
 public:
  void lock() noexcept {
    std::uint32_t nobody = 0;
    if (state_.compare_exchange_strong(nobody, kWriter, std::memory_order_acquire, std::memory_order_relaxed)) return;
    waiting_writers_.fetch_add(1, std::memory_order_relaxed);
    for (Backoff backoff;; backoff.pause()) {
      std::uint32_t free = 0;
      if (state_.load(std::memory_order_relaxed) == 0 &&
          state_.compare_exchange_weak(free, kWriter, std::memory_order_acquire, std::memory_order_relaxed)) {
        break;
      }
    }
    waiting_writers_.fetch_sub(1, std::memory_order_relaxed);
  }

  void unlock() noexcept { state_.store(0, std::memory_order_release); }

  void lock_shared() noexcept {
    for (Backoff backoff;; backoff.pause()) {
      std::uint32_t readers = state_.load(std::memory_order_relaxed);
      if (readers < kWriter && waiting_writers_.load(std::memory_order_relaxed) == 0 &&
          state_.compare_exchange_weak(readers, readers + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        return;
      }
    }
  }

  void unlock_shared() noexcept { state_.fetch_sub(1, std::memory_order_release); }

 private:
  struct Backoff {
    int spins = 0;
    void pause() noexcept {
      if (++spins < 64) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else {
        std::this_thread::yield();
      }
    }
  };

  static constexpr std::uint32_t kWriter = 1u << 31;
  std::atomic<std::uint32_t> state_{0};  // number of readers, or kWriter
  std::atomic<std::uint32_t> waiting_writers_{0};
};

}  // namespace monolith
