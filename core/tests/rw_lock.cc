// The lock of a shard. If it let a writer in beside a reader, rows would be read torn; if a waiting writer could be passed by
// readers for ever, training would stop while a server answers.
#include "rw_lock.h"

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "check.h"

namespace {

using monolith::RwLock;

void run_threads(int n, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(f, i);
  for (auto& thread : threads) thread.join();
}

}  // namespace

TEST("writers exclude each other") {
  RwLock lock;
  std::uint64_t counter = 0;  // not atomic: TSan and a wrong sum see two writers at once
  run_threads(4, [&](int) {
    for (int i = 0; i < 5000; ++i) {
      const std::lock_guard guard(lock);
      ++counter;
    }
  });
  CHECK_EQ(counter, 20000u);
}

TEST("readers see what writers wrote, whole") {
  RwLock lock;
  std::uint64_t a = 0, b = 0;
  std::atomic<int> torn{0};
  run_threads(4, [&](int thread) {
    for (int i = 0; i < 4000; ++i) {
      if (thread == 0) {
        const std::lock_guard guard(lock);
        ++a;
        ++b;
      } else {
        const std::shared_lock guard(lock);
        torn.fetch_add(a != b);
      }
    }
  });
  CHECK_EQ(torn.load(), 0);
  CHECK_EQ(a, 4000u);
}

TEST("readers are inside together") {
  RwLock lock;
  lock.lock_shared();
  std::thread other([&] {
    lock.lock_shared();  // would wait for ever behind an exclusive reader
    lock.unlock_shared();
  });
  other.join();
  lock.unlock_shared();
  lock.lock();
  lock.unlock();
}

TEST("a writer waits for the last reader") {
  RwLock lock;
  lock.lock_shared();
  lock.lock_shared();
  std::atomic<bool> written{false};
  std::thread writer([&] {
    lock.lock();
    written = true;
    lock.unlock();
  });
  lock.unlock_shared();
  for (int i = 0; i < 1000; ++i) {
    REQUIRE(!written.load());
    std::this_thread::yield();
  }
  lock.unlock_shared();
  writer.join();
  CHECK(written.load());
}

TEST("a writer gets in while readers come without end") {
  RwLock lock;
  std::atomic<bool> done{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!done.load()) {
        lock.lock_shared();
        for (int spin = 0; spin < 50; ++spin) std::atomic_signal_fence(std::memory_order_seq_cst);
        lock.unlock_shared();
      }
    });
  }
  // Ends only because a waiting writer keeps new readers out.
  for (int i = 0; i < 200; ++i) {
    lock.lock();
    lock.unlock();
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
}
