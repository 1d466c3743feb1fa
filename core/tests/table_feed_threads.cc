// Threads train, assign, erase, evict and clear while another reads the feed. When they have stopped, one more pass must make the copy
// equal to the table. Meant to run under TSan.
#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "feed_oracle.h"
#include "monolith/thread_pool.h"
#include "tables.h"

namespace {

constexpr std::uint32_t kDim = 4;

void write(monolith::Table& table, std::mt19937_64& random) {
  std::vector<std::int64_t> ids(1 + random() % 300);
  for (auto& id : ids) id = static_cast<std::int64_t>(random() % 3000);
  const std::vector<float> values(ids.size() * kDim, static_cast<float>(random() % 100));
  const float rate = 1;
  auto options = tables::options(rate);
  options.event_time = static_cast<std::uint32_t>(random() % 1000);
  const auto erased = std::make_unique<bool[]>(ids.size());
  switch (random() % 16) {
    case 0: table.evict(1000 + static_cast<std::uint32_t>(random() % 200)); break;
    case 1: table.erase(ids, erased.get()); break;
    case 2: table.assign(ids, values.data(), options.event_time); break;
    case 3:
      if (random() % 20 == 0) table.clear();
      break;
    default: table.apply_gradients(ids, values.data(), options);
  }
}

}  // namespace

TEST("a copy made by the feed equals the table once writers stop") {
  monolith::set_num_threads(2);
  auto config = tables::config(monolith::OptimizerKind::kAdagrad, kDim);
  config.default_expiry_seconds = 1000;
  monolith::Table table(config);
  table.track_feed();
  feed_oracle::Copy copy;
  for (int round = 0; round < 4; ++round) {
    std::atomic<bool> done{false};
    std::vector<std::thread> writers;
    for (int i = 0; i < 3; ++i) {
      writers.emplace_back([&, seed = round * 3 + i] {
        std::mt19937_64 random(static_cast<std::uint64_t>(seed));
        while (!done) write(table, random);
      });
    }
    for (int pass = 0; pass < 12; ++pass) copy.apply_all(table);
    done = true;
    for (auto& writer : writers) writer.join();
    copy.apply_all(table);
    REQUIRE(copy == feed_oracle::Copy::of(table));
  }
  monolith::set_num_threads(1);
}
