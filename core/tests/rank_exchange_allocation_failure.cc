// A rank that gets no memory must not send half a message or step some of its tables, and its next call must work.
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "check.h"
#include "failing_new.h"
#include "monolith/buckets.h"
#include "monolith/rank_exchange.h"
#include "tables.h"

using monolith::OwnerSplit;
using monolith::SplitTable;
using monolith::Table;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

namespace {

Ids numbers(std::size_t count) {
  Ids ids(count);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

constexpr float kRates[] = {0.5f, 0.5f};

struct Two {
  Two() {
    for (const char* name : {"one", "two"}) {
      auto config = tables::config();
      config.name = name;
      tables.push_back(std::make_unique<Table>(config));
    }
  }
  std::vector<Table*> pointers() const { return {tables[0].get(), tables[1].get()}; }
  std::vector<std::unique_ptr<Table>> tables;
};

}  // namespace

TEST("a split, the marks of distinct ids included") {
  // More ids than any split before it in this process: the marks have to grow.
  const Ids first = numbers(300000), second{5, 5, 7};
  const SplitTable tables[] = {{0, 4, true, first}, {1, 2, false, second}};
  const std::vector<std::uint16_t> owners(monolith::kBuckets, 0);
  const auto failures = failing_new::each_allocation(
      [] { return 0; }, [&](int) { OwnerSplit(tables, owners, 1, 3); },
      [&](int) {
        const OwnerSplit split(tables, owners, 1, 3);
        CHECK_EQ(split.message(0).size(), 6 + 2 * first.size() + 2);
        CHECK_EQ(split.sizes(0)[1], 2);
      });
  CHECK(failures >= 8);
}

TEST("pooling") {
  const Ids ids{5, 5, 7};
  const SplitTable tables[] = {{0, 2, false, ids}};
  const OwnerSplit split(tables, {}, 1, 3);
  const Floats rows{1, 2, 3, 4};
  Floats out(6);
  const std::vector<std::span<const float>> answers{rows};
  const monolith::SplitBags<float> bags[] = {{{}, monolith::Pooling::kSum, out.data(), 2}};
  CHECK(failing_new::each_allocation([] { return 0; }, [&](int) { split.pool(answers, bags); },
                                     [&](int) {
                                       split.pool(answers, bags);
                                       CHECK((out == Floats{1, 2, 1, 2, 3, 4}));
                                     }) >= 1);
}

TEST("answers to messages") {
  const Ids message{3, 2, 0, 2, 1, 1, 5, 6, 5};
  const std::vector<std::span<const std::int64_t>> messages{message, message};
  const Two two;
  const std::vector<const Table*> tables{two.tables[0].get(), two.tables[1].get()};
  Floats out(24);
  CHECK(failing_new::each_allocation([] { return 0; }, [&](int) { monolith::lookup_messages(tables, messages, out); },
                                     [&](int) { CHECK_EQ(monolith::lookup_messages(tables, messages, out).back(), 24u); }) >= 3);
}

TEST("a step: before the tables are reached nothing has changed") {
  const Ids message{3, 2, 0, 2, 1, 1, 5, 6, 5};
  const std::vector<std::span<const std::int64_t>> messages{message, message};
  const Floats grads(12, 1.0f);
  const std::vector<std::span<const float>> values{grads, grads};
  monolith::UpdateOptions options;
  options.learning_rates = kRates;
  const auto failures = failing_new::each_allocation(
      [] { return std::make_unique<Two>(); },
      [&](const std::unique_ptr<Two>& two) { monolith::apply_messages(two->pointers(), messages, values, options); },
      [&](const std::unique_ptr<Two>& two) {
        // A table that has made its step is not stepped again by this check: a row is there whole or not at all.
        const std::uint64_t rows = two->tables[0]->size() + two->tables[1]->size();
        CHECK(rows <= 3);
        monolith::apply_messages(two->pointers(), messages, values, options);
        CHECK_EQ(two->tables[0]->size() + two->tables[1]->size(), 3u);
      });
  CHECK(failures >= 5);
}
