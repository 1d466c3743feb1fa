// The original's filter was not thread safe: concurrent trainers lost counts. Here none may be lost. Meant to run under TSan too.
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/admission.h"

using monolith::SlidingFilter;
using monolith::SlotThresholds;

TEST("an id offered n times by many threads is dropped exactly T times") {
  constexpr std::uint32_t kThreshold = 9;
  constexpr std::size_t kIds = 2000;
  SlidingFilter filter(1000000, 7, SlotThresholds(kThreshold));
  std::vector<std::int64_t> ids(kIds);
  for (std::size_t i = 0; i < kIds; ++i) ids[i] = static_cast<std::int64_t>(i);
  std::vector<std::atomic<int>> dropped(kIds);
  std::atomic<bool> done{false};
  // A saver beside the writers: what it sees must always be a filter that can be restored.
  std::thread saver([&] {
    SlidingFilter copy(1000000, 7, SlotThresholds(kThreshold));
    while (!done) copy.restore(filter.serialize());
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto out = std::make_unique<bool[]>(kIds);
      for (int round = 0; round < 5; ++round) {
        if (t % 2 == 0) {
          filter.admit(ids, {}, {out.get(), kIds});
          for (std::size_t i = 0; i < kIds; ++i) dropped[i] += !out[i];
        } else {
          for (std::size_t i = 0; i < kIds; ++i) dropped[i] += !filter.admit(ids[i], 1);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  done = true;
  saver.join();
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < kIds; ++i) wrong += dropped[i] != static_cast<int>(kThreshold);
  // Two ids with one signature in one neighbourhood share a counter and are admitted early; that is rare, and never late.
  for (std::size_t i = 0; i < kIds; ++i) CHECK(dropped[i] <= static_cast<int>(kThreshold));
  CHECK(wrong <= 4);
}
