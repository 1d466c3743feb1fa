// Writers and the flusher run at once. The oracle: the last write of every id must be followed by a committed steal that has it.
// Meant to run under TSan too.
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/touched_set.h"

using monolith::ChangedIdSet;
using Ids = std::vector<std::int64_t>;

TEST("no write is lost between steals, commits and rollbacks") {
  constexpr int kThreads = 3;
  constexpr std::size_t kIds = 4000;
  constexpr int kRounds = 60;
  ChangedIdSet set;
  // version[i] counts the writes of id i; the flusher copies it when it commits. The set must make them meet in the end.
  std::vector<std::atomic<int>> version(kIds);
  std::vector<int> durable(kIds, 0);
  std::atomic<bool> done{false};

  std::thread flusher([&] {
    std::mt19937_64 random(99);
    bool last = false;
    while (true) {
      const auto batch = set.steal();
      if (!last && random() % 3 == 0) {
        set.rollback();
      } else {
        for (const std::int64_t id : *batch) durable[id] = version[id].load();
        set.commit();
        if (last) break;
      }
      last = done;
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int round = 0; round < kRounds; ++round) {
        Ids batch(1 + random() % 600);
        for (auto& id : batch) {
          id = static_cast<std::int64_t>(random() % kIds);
          ++version[id];
        }
        set.insert(batch);
      }
    });
  }
  for (auto& writer : writers) writer.join();
  done = true;
  flusher.join();
  int stale = 0;
  for (std::size_t i = 0; i < kIds; ++i) stale += durable[i] != version[i].load();
  CHECK_EQ(stale, 0);
  CHECK_EQ(set.size(), 0u);
}

TEST("steal, commit and rollback from several threads: each flight ends exactly once") {
  ChangedIdSet set;
  Ids ids(1000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  set.insert(ids);
  std::atomic<int> flights{0};
  std::atomic<int> ends{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        try {
          set.steal();
          ++flights;
        } catch (const std::exception&) {
        }
        try {
          set.rollback();
          ++ends;
        } catch (const std::exception&) {
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(flights.load(), ends.load());
  CHECK_EQ(set.size(), ids.size());
}
