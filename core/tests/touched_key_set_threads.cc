// Concurrent inserts and steals must neither lose an id nor invent one: serving would miss an update, or push a row that was
// never written. Meant to run under TSan too.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/touched_set.h"

using monolith::TouchedKeySet;
using Ids = std::vector<std::int64_t>;

TEST("below capacity every id is stolen at least once, and only ids that were inserted") {
  constexpr int kThreads = 4;
  constexpr std::int64_t kPerThread = 20000;
  for (const std::int64_t level : {1, 64}) {
    TouchedKeySet set(1 << 20, level);
    std::atomic<bool> done{false};
    Ids stolen;
    std::thread thief([&] {
      while (true) {
        const bool last = done;
        const Ids ids = set.steal();
        stolen.insert(stolen.end(), ids.begin(), ids.end());
        if (last) break;
      }
    });
    std::vector<std::thread> writers;
    std::atomic<std::uint64_t> dropped{0};
    for (int t = 0; t < kThreads; ++t) {
      writers.emplace_back([&, t] {
        std::mt19937_64 random(t);
        for (std::int64_t at = 0; at < kPerThread;) {
          Ids batch(std::min<std::int64_t>(1 + random() % 700, kPerThread - at));
          for (auto& id : batch) id = t * kPerThread + at++;
          dropped += set.insert(batch);
        }
      });
    }
    for (auto& writer : writers) writer.join();
    done = true;
    thief.join();
    std::sort(stolen.begin(), stolen.end());
    CHECK_EQ(dropped.load(), 0u);
    // Each id is inserted once here, so it is stolen exactly once.
    CHECK_EQ(stolen.size(), std::size_t{kThreads * kPerThread});
    for (std::size_t i = 0; i < stolen.size(); ++i) REQUIRE(stolen[i] == static_cast<std::int64_t>(i));
    CHECK_EQ(set.size(), 0u);
  }
}

TEST("over capacity: what was dropped plus what is left is what was inserted, and the bound holds at every moment") {
  constexpr int kThreads = 4;
  constexpr std::int64_t kPerThread = 30000;
  for (const std::int64_t capacity : {100, 5000, 50000}) {
    TouchedKeySet set(capacity, 16);
    std::atomic<bool> done{false};
    std::atomic<bool> exceeded{false};
    std::thread watcher([&] {
      while (!done) exceeded = exceeded || set.size() > static_cast<std::size_t>(capacity) + 1;
    });
    std::atomic<std::uint64_t> dropped{0};
    std::vector<std::thread> writers;
    for (int t = 0; t < kThreads; ++t) {
      writers.emplace_back([&, t] {
        std::mt19937_64 random(t);
        for (std::int64_t at = 0; at < kPerThread;) {
          Ids batch(std::min<std::int64_t>(1 + random() % 500, kPerThread - at));
          for (auto& id : batch) id = t * kPerThread + at++;
          dropped += set.insert(batch);
        }
      });
    }
    for (auto& writer : writers) writer.join();
    done = true;
    watcher.join();
    CHECK(!exceeded);
    CHECK_EQ(dropped + set.steal().size(), std::uint64_t{kThreads * kPerThread});
  }
}
