// Writes other than gradients: what an import, a repair or a batch of corrections does. Each must change the rows it names,
// keep what it says it keeps, and answer for every id in the order of the call.
#include <cstdint>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::Table;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

monolith::TableConfig config(monolith::OptimizerKind kind = monolith::OptimizerKind::kAdagrad) {
  auto config = tables::config(kind, 2);
  config.segments[0].initializer = {monolith::InitializerKind::kConstant, 0.5f, 0};
  return config;
}

Floats values(const Table& table, const Ids& ids) {
  Floats out(ids.size() * table.dim());
  table.lookup(ids, out.data());
  return out;
}

void train(Table& table, const Ids& ids, float gradient = 1.0f, std::uint32_t time = 0) {
  const float rate = 0.1f;
  auto options = tables::options(rate);
  options.event_time = time;
  table.apply_gradients(ids, Floats(ids.size() * table.dim(), gradient).data(), options);
}

// Value and accumulator of a row, or nothing.
Floats entry(const Table& table, std::int64_t id) {
  monolith::RowBatch batch;
  bool found = false;
  table.copy_rows(Ids{id}, &found, batch);
  if (!found) return {};
  Floats all(4);
  table.decode(batch.rows, {all.data(), {all.data() + 2}});
  return all;
}

}  // namespace

TEST("assign sets values, the last of equal ids wins, and optimizer state stays") {
  Table table(config());
  train(table, {1, 2});
  const float accumulator = entry(table, 1)[2];
  CHECK(accumulator > 0.1f);
  table.assign(Ids{1, 3, 1}, Floats{9, 9, 3, 4, 1, 2}.data(), 5);
  CHECK(values(table, {1, 3}) == (Floats{1, 2, 3, 4}));
  CHECK_EQ(entry(table, 1)[2], accumulator);
  CHECK_NEAR(entry(table, 3)[2], 0.1f, 1e-7);  // fresh
  CHECK_EQ(table.size(), 3u);
  CHECK_EQ(table.max_event_time(), 5u);
}

TEST("assign_add starts from the initial value and adds every occurrence") {
  Table table(config());
  table.assign_add(Ids{1, 1, 2}, Floats{1, 2, 10, 20, 0, 0}.data(), 0);
  CHECK(values(table, {1, 2}) == (Floats{11.5f, 22.5f, 0.5f, 0.5f}));
  table.assign_add(Ids{1}, Floats{-1, -2}.data(), 0);
  CHECK(values(table, {1}) == (Floats{10.5f, 20.5f}));
}

TEST("reinitialize resets value and state and says who was there") {
  Table table(config());
  train(table, {1, 2, 2});
  std::int32_t existed[4] = {7, 7, 7, 7};
  table.reinitialize(Ids{5, 1, 5, 2}, 9, existed);
  CHECK_EQ(existed[0], 0);
  CHECK_EQ(existed[1], 1);
  CHECK_EQ(existed[2], 1);  // the first made it
  CHECK_EQ(existed[3], 1);
  for (const std::int64_t id : {1, 2, 5}) {
    CHECK(values(table, {id}) == (Floats{0.5f, 0.5f}));
    CHECK_NEAR(entry(table, id)[2], 0.1f, 1e-7);
  }
}

TEST("erase removes each id once, and its row is used again") {
  Table table(config());
  Ids ids;
  for (std::int64_t id = 0; id < 2000; ++id) ids.push_back(id);
  train(table, ids);
  const std::uint64_t bytes = table.stats().bytes;
  bool erased[4];
  table.erase(Ids{7, 7, 9999, 1999}, erased);
  CHECK(erased[0] != erased[1]);
  CHECK(!erased[2]);
  CHECK(erased[3]);
  bool found[3];
  table.contains(Ids{7, 8, 1999}, found);
  CHECK(!found[0] && found[1] && !found[2]);
  CHECK_EQ(table.size(), 1998u);
  for (int round = 0; round < 30; ++round) {
    std::vector<std::uint8_t> removed(ids.size());
    table.erase(ids, reinterpret_cast<bool*>(removed.data()));
    CHECK_EQ(table.size(), 0u);
    train(table, ids);
  }
  CHECK(table.stats().bytes <= bytes + bytes / 4);
}

TEST("an erased id begins anew") {
  Table table(config());
  train(table, {4}, 5.0f);
  bool erased;
  table.erase(Ids{4}, &erased);
  CHECK(values(table, {4}) == (Floats{0.5f, 0.5f}));
  CHECK(entry(table, 4).empty());
  train(table, {4}, 0.0f);
  CHECK_NEAR(entry(table, 4)[2], 0.1f, 1e-7);
}

TEST("gradients of equal ids are summed, or stepped one after the other if asked") {
  for (const bool sequential : {false, true}) {
    Table table(config());
    const float rate = 1;
    auto options = tables::options(rate);
    options.sequential = sequential;
    table.apply_gradients(Ids{1, 1}, Floats{1, 2, 3, 4}.data(), options);
    const auto step = [](float w, float& sum, float g) {
      sum += g * g;
      return w - g / std::sqrt(sum);
    };
    float sum = 0.1f, expected = 0.5f;
    if (sequential) {
      expected = step(expected, sum, 1);
      expected = step(expected, sum, 3);
    } else {
      expected = step(expected, sum, 4);
    }
    CHECK_NEAR(values(table, {1})[0], expected, 1e-6);
    CHECK_NEAR(entry(table, 1)[2], sum, 1e-5);
  }
}

TEST("rows expire by the time of their last update and the expiry of their slot") {
  auto expiring = config();
  expiring.default_expiry_seconds = 100;
  expiring.slot_expiry_seconds = {{3, 10}, {4, 1000}};
  Table table(expiring);
  const auto id = [](std::uint64_t slot) { return static_cast<std::int64_t>(slot << 48 | 1); };
  train(table, {id(1), id(3), id(4)}, 1, 1000);
  CHECK_EQ(table.evict(1009), 0u);
  CHECK_EQ(table.evict(1010), 1u);  // slot 3
  train(table, {id(1)}, 1, 1050);
  CHECK_EQ(table.evict(1149), 0u);
  CHECK_EQ(table.evict(1150), 1u);  // slot 1, counted from its last update
  CHECK(table.expired(id(4), 1000, 2000));
  CHECK(!table.expired(id(4), 1000, 1999));
  CHECK_EQ(table.evict(5), 0u);  // a clock that went back removes nothing
  CHECK_EQ(table.size(), 1u);
  CHECK_EQ(table.evict(2000), 1u);
}

TEST("clear removes all rows and gives their memory back") {
  Table table(config());
  const std::uint64_t empty = table.stats().bytes;
  Ids ids;
  for (std::int64_t i = 0; i < 50000; ++i) ids.push_back(i * 3);
  train(table, ids);
  CHECK(table.stats().bytes > 2 * empty);
  table.clear();
  CHECK_EQ(table.size(), 0u);
  CHECK(table.stats().bytes < table.stats().row_bytes * 50000);
  train(table, {1});
  CHECK_EQ(table.size(), 1u);
}
