// Threads train, assign, erase, evict and clear while another cuts, reads, commits and rolls back. Writers pause for the moment of
// a cut only, so the table's image then is known exactly: the replica built from the committed cuts must equal it each time.
// Meant to run under TSan.
#include <atomic>
#include <random>
#include <shared_mutex>
#include <thread>

#include "change_oracle.h"
#include "check.h"
#include "monolith/thread_pool.h"
#include "tables.h"

using change_oracle::Changes;
using change_oracle::Image;

namespace {

constexpr std::uint32_t kDim = 4;
constexpr int kWriters = 3;
constexpr int kCuts = 40;

class Writers {
 public:
  Writers(monolith::Table& table, std::uint64_t seed) {
    for (int i = 0; i < kWriters; ++i) {
      threads_.emplace_back([this, &table, seed, i] {
        std::mt19937_64 random(seed * kWriters + static_cast<std::uint64_t>(i));
        while (!done_) {
          // A shared_mutex may prefer readers for ever: they have to step aside themselves.
          while (pausing_) std::this_thread::yield();
          const std::shared_lock running(running_);
          write(table, random);
        }
      });
    }
  }
  ~Writers() {
    done_ = true;
    for (auto& thread : threads_) thread.join();
  }
  template <typename Act>
  void pause_for(Act&& act) {
    pausing_ = true;
    {
      const std::unique_lock paused(running_);
      act();
    }
    pausing_ = false;
  }

 private:
  static void write(monolith::Table& table, std::mt19937_64& random) {
    std::vector<std::int64_t> ids(1 + random() % 300);
    for (auto& id : ids) id = static_cast<std::int64_t>(random() % 3000);
    const auto time = static_cast<std::uint32_t>(random() % 1000);
    const std::vector<float> values(ids.size() * kDim, static_cast<float>(random() % 100));
    const float rate = 1;
    auto options = tables::options(rate);
    options.event_time = time;
    const auto erased = std::make_unique<bool[]>(ids.size());
    switch (random() % 16) {
      case 0: table.evict(1000 + static_cast<std::uint32_t>(random() % 200)); break;
      case 1: table.erase(ids, erased.get()); break;
      case 2: table.assign(ids, values.data(), time); break;
      case 3: table.assign_add(ids, values.data(), time); break;
      case 4:
        if (random() % 20 == 0) table.clear();
        break;
      default: table.apply_gradients(ids, values.data(), options);
    }
  }

  std::shared_mutex running_;
  std::atomic<bool> pausing_{false};
  std::atomic<bool> done_{false};
  std::vector<std::thread> threads_;
};

}  // namespace

TEST("the replica equals the table at every cut") {
  monolith::set_num_threads(2);
  auto config = tables::config(monolith::OptimizerKind::kAdagrad, kDim);
  config.default_expiry_seconds = 1000;
  monolith::Table table(config);
  table.track_changes();
  Image replica;
  int committed = 0;
  {
    Writers writers(table, 7);
    std::mt19937_64 random(1);
    for (int i = 0; i < kCuts; ++i) {
      Image then;
      std::uint64_t cut = 0;
      writers.pause_for([&] {
        cut = table.cut_changes();
        then = change_oracle::image_of(table);
      });
      Changes changes;
      monolith::ChangeBatch piece;
      const bool read = random() % 4 != 0;
      while (read && table.read_changes(cut, piece)) changes.add(piece);
      if (!read || random() % 4 == 0) {
        table.rollback_changes(cut);
        continue;
      }
      table.commit_changes(cut);
      ++committed;
      changes.apply_to(replica);
      REQUIRE(replica == then);
    }
  }
  change_oracle::cut_and_commit(table).apply_to(replica);
  CHECK(replica == change_oracle::image_of(table));
  CHECK(committed > kCuts / 4);
  monolith::set_num_threads(1);
}

TEST("a cut through running writers loses nothing") {
  monolith::set_num_threads(2);
  monolith::Table table(tables::config(monolith::OptimizerKind::kSgd, kDim));
  Image replica;
  {
    Writers writers(table, 8);
    while (table.size() < 100) std::this_thread::yield();
    table.track_changes();
    // Has all that was written before tracking, and some of what was written since: the cuts bring that again.
    writers.pause_for([&] { replica = change_oracle::image_of(table); });
  }
  {
    Writers writers(table, 9);
    for (int i = 0; i < kCuts; ++i) change_oracle::cut_and_commit(table).apply_to(replica);
  }
  change_oracle::cut_and_commit(table).apply_to(replica);
  CHECK(replica == change_oracle::image_of(table));
  monolith::set_num_threads(1);
}
