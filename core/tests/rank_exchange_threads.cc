// A rank looks up the next batch in another thread while it trains: splits must not share their marks, and rows that are stepped
// meanwhile are read whole.
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/buckets.h"
#include "monolith/rank_exchange.h"
#include "tables.h"

using monolith::OwnerSplit;
using monolith::SplitTable;
using monolith::Table;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

namespace {

std::vector<std::uint16_t> halves() {
  std::vector<std::uint16_t> owners(monolith::kBuckets);
  for (std::size_t b = 0; b < owners.size(); ++b) owners[b] = b < owners.size() / 2 ? 0 : 1;
  return owners;
}

Ids random_ids(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  Ids ids(count);
  for (std::int64_t& id : ids) id = static_cast<std::int64_t>(random() % 300);
  return ids;
}

}  // namespace

TEST("splits of several threads are those of one") {
  const auto owners = halves();
  std::vector<Ids> requests;
  std::vector<Ids> expected;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    requests.push_back(random_ids(seed, 200 + 300 * seed));
    const SplitTable tables[] = {{0, 4, true, requests.back()}, {1, 1, false, requests.front()}};
    const OwnerSplit split(tables, owners, 2, 1);
    const auto message = split.message(1);
    expected.emplace_back(message.begin(), message.end());
  }
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t round = 0; round < 40; ++round) {
        const std::size_t r = (t * 3 + round) % requests.size();
        const SplitTable tables[] = {{0, 4, true, requests[r]}, {1, 1, false, requests.front()}};
        const OwnerSplit split(tables, owners, 2, 1);
        const auto message = split.message(1);
        if (Ids(message.begin(), message.end()) != expected[r]) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST("messages are answered while others are applied") {
  auto config = tables::config(monolith::OptimizerKind::kSgd, 8);
  Table table(config);
  const std::vector<Table*> stepped{&table};
  const std::vector<const Table*> read{&table};
  const Ids ids = random_ids(3, 500);
  const SplitTable part[] = {{0, 8, false, ids}};
  const OwnerSplit split(part, {}, 1, 1);
  const auto message = split.message(0);
  const Floats grads(split.floats_before(1), 1.0f);
  const float rate = 1.0f;
  monolith::UpdateOptions options;
  options.learning_rates = {&rate, 1};
  std::atomic<bool> done = false;
  std::atomic<int> torn = 0;
  std::thread reader([&] {
    Floats out(grads.size());
    while (!done) {
      monolith::lookup_messages(read, std::vector<std::span<const std::int64_t>>{message}, out);
      for (std::size_t row = 0; row < out.size(); row += 8) {
        for (std::size_t k = 1; k < 8; ++k) torn += out[row + k] != out[row];
      }
    }
  });
  for (int step = 0; step < 200; ++step) {
    monolith::apply_messages(stepped, std::vector<std::span<const std::int64_t>>{message, message},
                             std::vector<std::span<const float>>{grads, grads}, options);
  }
  done = true;
  reader.join();
  CHECK_EQ(torn.load(), 0);
  Floats last(grads.size());
  monolith::lookup_messages(read, std::vector<std::span<const std::int64_t>>{message}, last);
  CHECK_EQ(last[0], -400.0f);
}
