// Requests of several threads to the same tables, in different orders, while each request is itself shared by threads. A row must
// be read whole, no update lost, and there must be no deadlock. Meant to run under TSan.
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/table.h"
#include "monolith/thread_pool.h"
#include "tables.h"

namespace {

using monolith::Pooling;
using monolith::Table;
using monolith::TableRead;
using monolith::TableUpdate;

constexpr std::size_t kTables = 8, kIds = 700, kDim = 6;
constexpr int kRounds = 25;

}  // namespace

TEST("requests of several threads to the same tables") {
  monolith::set_num_threads(3);
  std::vector<std::unique_ptr<Table>> made;
  for (std::size_t t = 0; t < kTables; ++t) {
    auto config = tables::config(monolith::OptimizerKind::kSgd, kDim);
    config.name = std::to_string(t);
    made.push_back(std::make_unique<Table>(config));
  }
  std::vector<std::int64_t> ids(kIds);
  for (std::size_t i = 0; i < kIds; ++i) ids[i] = static_cast<std::int64_t>(i) * 977;
  const std::vector<float> grads(kIds * kDim, -1.0f);
  const float rate = 1;
  std::atomic<int> torn{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const auto table = [&](std::size_t t) { return made[thread % 2 == 0 ? t : kTables - 1 - t].get(); };
      std::vector<std::vector<float>> outs(kTables, std::vector<float>(kIds * kDim));
      for (int round = 0; round < kRounds; ++round) {
        std::vector<TableUpdate> updates;
        std::vector<TableRead> reads;
        for (std::size_t t = 0; t < kTables; ++t) {
          updates.push_back({table(t), ids, {}, Pooling::kSum, grads.data(), kDim, tables::options(rate)});
          reads.push_back({table(t), ids, {}, Pooling::kSum, outs[t].data(), kDim});
        }
        if (thread < 2) {
          monolith::apply_many(updates);
          continue;
        }
        monolith::lookup_many(reads);
        for (const auto& out : outs) {
          for (std::size_t i = 0; i < out.size(); ++i) torn.fetch_add(out[i] != out[i / kDim * kDim]);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(torn.load(), 0);
  for (const auto& table : made) {
    std::vector<float> out(kIds * kDim);
    table->lookup(ids, out.data());
    for (const float value : out) REQUIRE(value == 2 * kRounds);
  }
  monolith::set_num_threads(1);
}
