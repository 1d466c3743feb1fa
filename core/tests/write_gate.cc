// Only the gate keeps a lookup without locks from reading a row while it is written: a reader inside must block every writer, and
// a writer inside must keep every reader out.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/write_gate.h"

using monolith::WriteGate;

TEST("a reader is turned away while somebody writes, and let in afterwards") {
  WriteGate gate;
  {
    const WriteGate::Writing writing(gate);
    const WriteGate::Writing another(gate);
    CHECK(!WriteGate::Reading(gate).open());
  }
  CHECK(WriteGate::Reading(gate).open());
}

TEST("a writer waits until the readers inside have left") {
  WriteGate gate;
  std::atomic<bool> left{false};
  std::atomic<bool> saw_left{false};
  std::thread writer;
  {
    const WriteGate::Reading reading(gate);
    REQUIRE(reading.open());
    writer = std::thread([&] {
      const WriteGate::Writing writing(gate);
      saw_left = left.load();
    });
    // The writer is at the gate as soon as new readers are turned away.
    while (WriteGate::Reading(gate).open()) std::this_thread::yield();
    left = true;
  }
  writer.join();
  CHECK(saw_left.load());
}

TEST("what writers guard by the gate alone is never seen half changed") {
  WriteGate gate;
  // Two plain numbers: under TSan the gate must order every access.
  long first = 0, second = 0;
  std::atomic<int> torn{0}, reads{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      while (reads.load() < 2000) {
        const WriteGate::Reading reading(gate);
        if (!reading.open()) {
          std::this_thread::yield();
          continue;
        }
        torn += first != second;
        ++reads;
      }
    });
  }
  threads.emplace_back([&] {
    while (reads.load() < 2000) {
      {
        const WriteGate::Writing writing(gate);
        ++first;
        ++second;
      }
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(torn.load(), 0);
  CHECK_EQ(first, second);
}
