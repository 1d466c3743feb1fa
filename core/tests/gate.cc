// The turnstile before a set that is stolen while others insert. glibc's shared_mutex alone prefers readers: the thief would
// wait as long as inserts overlap, and a set that is full could never be emptied.
#include "gate.h"

#include <atomic>
#include <thread>
#include <vector>

#include "check.h"

using monolith::Gate;

TEST("those who entered are inside together") {
  Gate gate;
  const auto first = gate.enter();
  std::thread other([&] { const auto second = gate.enter(); });
  other.join();
}

TEST("whoever closes the gate is alone") {
  Gate gate;
  std::uint64_t value = 0;
  std::atomic<int> seen_half{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 1500; ++i) {
        if (t == 0) {
          const auto alone = gate.close();
          ++value;
          ++value;
        } else {
          const auto inside = gate.enter();
          seen_half.fetch_add(value % 2 != 0);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(seen_half.load(), 0);
  CHECK_EQ(value, 3000u);
}

TEST("the gate closes while others come without end") {
  Gate gate;
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (int t = 0; t < 3; ++t) {
    others.emplace_back([&] {
      while (!done.load()) const auto inside = gate.enter();
    });
  }
  for (int i = 0; i < 100; ++i) const auto alone = gate.close();
  done = true;
  for (std::thread& other : others) other.join();
}
