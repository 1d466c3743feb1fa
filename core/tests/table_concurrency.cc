// Many threads read, train, insert, erase and evict at once. Rows are written with all elements equal, so that a torn row shows;
// sums are exact, so that a lost or doubled update shows. Meant to run under TSan.
#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "monolith/thread_pool.h"
#include "tables.h"

namespace {

constexpr std::uint32_t kDim = 24;

void run_threads(int n, const std::function<void(int)>& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(f, i);
  for (auto& thread : threads) thread.join();
}

bool whole(const float* row) {
  for (std::uint32_t i = 1; i < kDim; ++i) {
    if (row[i] != row[0]) return false;
  }
  return true;
}

}  // namespace

TEST("no update is lost, none is applied twice, no row is torn") {
  monolith::set_num_threads(2);
  monolith::Table table(tables::config(monolith::OptimizerKind::kSgd, kDim));
  constexpr int kRounds = 30;
  constexpr std::size_t kIds = 3000;
  constexpr std::size_t kBatch = 9000;  // large enough to use the pool inside a call, with duplicates
  std::atomic<int> torn{0};
  run_threads(4, [&](int thread) {
    std::mt19937_64 random(static_cast<std::uint64_t>(thread));
    std::vector<std::int64_t> ids(kBatch);
    std::vector<float> values(kBatch * kDim, -1.0f);
    const float rate = 1;
    for (int round = 0; round < kRounds; ++round) {
      for (std::size_t i = 0; i < kBatch; ++i) ids[i] = static_cast<std::int64_t>((i + random() % 2 * 7) % kIds);
      if (thread < 2) {
        for (std::size_t i = 0; i < kBatch; ++i) ids[i] = static_cast<std::int64_t>(i % kIds);
        table.apply_gradients(ids, values.data(), tables::options(rate));
      } else {
        std::vector<float> out(kBatch * kDim);
        table.lookup(ids, out.data());
        for (std::size_t i = 0; i < kBatch; ++i) torn += !whole(out.data() + i * kDim);
      }
    }
  });
  CHECK_EQ(torn.load(), 0);
  std::vector<std::int64_t> ids(kIds);
  for (std::size_t i = 0; i < kIds; ++i) ids[i] = static_cast<std::int64_t>(i);
  std::vector<float> out(kIds * kDim);
  table.lookup(ids, out.data());
  // Two writers, kRounds batches each, every id three times per batch, each gradient adding 1.
  for (std::size_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == 2 * kRounds * (kBatch / kIds));
  monolith::set_num_threads(1);
}

TEST("inserting, erasing, evicting and growing beside readers") {
  auto config = tables::config(monolith::OptimizerKind::kSgd, kDim);
  config.default_expiry_seconds = 1;
  monolith::Table table(config);
  std::vector<std::int64_t> fixed(500);
  for (std::size_t i = 0; i < fixed.size(); ++i) fixed[i] = -1 - static_cast<std::int64_t>(i);
  const std::vector<float> sevens(fixed.size() * kDim, 7.0f);
  table.assign(fixed, sevens.data(), 1000);
  std::atomic<int> wrong{0};
  run_threads(4, [&](int thread) {
    std::vector<std::int64_t> ids(400);
    const std::vector<float> values(ids.size() * kDim, 1.0f);
    std::vector<float> out(fixed.size() * kDim);
    bool erased[400];
    for (int round = 0; round < 120; ++round) {
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<std::int64_t>(i) + 400 * (thread * 1000 + round);
      }
      switch (thread) {
        case 0:  // inserts that will expire
          table.assign(ids, values.data(), 10);
          break;
        case 1:
          table.assign(ids, values.data(), 1000);
          table.erase(ids, erased);
          break;
        case 2: table.evict(1000); break;
        default:
          table.lookup(fixed, out.data());
          for (const float x : out) wrong += x != 7.0f;
      }
    }
  });
  CHECK_EQ(wrong.load(), 0);
  table.evict(1000);
  CHECK_EQ(table.size(), fixed.size());
}

TEST("clear beside readers and writers leaves a usable table") {
  monolith::Table table(tables::config(monolith::OptimizerKind::kSgd, kDim));
  run_threads(3, [&](int thread) {
    std::vector<std::int64_t> ids(600);
    const std::vector<float> values(ids.size() * kDim, 1.0f);
    std::vector<float> out(ids.size() * kDim);
    for (int round = 0; round < 60; ++round) {
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) + 600 * (round % 10);
      if (thread == 0) {
        table.clear();
      } else if (thread == 1) {
        table.assign(ids, values.data(), 0);
      } else {
        table.lookup(ids, out.data());
      }
    }
  });
  table.clear();
  CHECK_EQ(table.size(), 0u);
}
