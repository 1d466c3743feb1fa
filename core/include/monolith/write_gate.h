// Lets lookups run without any lock while nobody writes. A reader announces itself on a counter of its own thread, so readers
// share no cache line; a writer announces itself once for all readers and waits until those inside have left. While a writer is
// at work readers are turned away and take the shards' locks instead, so neither side can starve the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace monolith {

class WriteGate {
 public:
  // For the length of a short read. If it is not open, writers may be at work.
  class Reading {
   public:
    explicit Reading(WriteGate& gate) noexcept : readers_(&gate.counters_[my_counter()].readers) {
      // Sequentially consistent on both sides: of a reader and a writer that arrive together at least one sees the other.
      readers_->fetch_add(1, std::memory_order_seq_cst);
      if (gate.writers_.load(std::memory_order_seq_cst) == 0) return;
      readers_->fetch_sub(1, std::memory_order_release);
      readers_ = nullptr;
    }
    ~Reading() {
      if (readers_ != nullptr) readers_->fetch_sub(1, std::memory_order_release);
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    bool open() const noexcept { return readers_ != nullptr; }

   private:
    std::atomic<std::uint32_t>* readers_;
  };

  // For the length of a write. Writers do not exclude each other: they hold the locks of the shards they change.
  class Writing {
   public:
    explicit Writing(WriteGate& gate) noexcept : gate_(&gate) {
      gate.writers_.fetch_add(1, std::memory_order_seq_cst);
      for (const Counter& counter : gate.counters_) {
        while (counter.readers.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
      }
    }
    ~Writing() { gate_->writers_.fetch_sub(1, std::memory_order_release); }
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

   private:
    WriteGate* gate_;
  };

 private:
  static constexpr std::uint32_t kCounters = 32;
  struct alignas(64) Counter {
    std::atomic<std::uint32_t> readers{0};
  };

  static std::uint32_t my_counter() noexcept {
    static std::atomic<std::uint32_t> threads{0};
    static thread_local const std::uint32_t mine = threads.fetch_add(1, std::memory_order_relaxed) % kCounters;
    return mine;
  }

  Counter counters_[kCounters];
  alignas(64) std::atomic<std::uint32_t> writers_{0};
};

}  // namespace monolith
