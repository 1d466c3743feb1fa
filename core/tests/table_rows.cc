// Raw rows travel between tables: checkpoints, servers that move buckets, exports. What is encoded must decode to the same, and
// rows put into another table must be the same there.
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::OptimizerKind;
using monolith::RowBatch;
using monolith::Table;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

monolith::TableConfig config() {
  auto config = tables::config(OptimizerKind::kAdam, 3);
  config.segments.push_back(config.segments[0]);
  config.segments[1].dim = 1;
  config.segments[1].optimizer.kind = OptimizerKind::kBatchSoftmax;
  config.segments.push_back(config.segments[0]);
  config.segments[2].precision = monolith::Precision::kFp16;
  return config;
}

constexpr std::size_t kIds = 700;

Ids all_ids() {
  Ids ids;
  for (std::size_t i = 0; i < kIds; ++i) ids.push_back(static_cast<std::int64_t>(i) * 91 - 5000);
  return ids;
}

std::unique_ptr<Table> trained() {
  auto table = std::make_unique<Table>(config());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const Ids ids = all_ids();
  const float rates[] = {0.1f, 0.5f, 0.1f};
  for (std::int64_t step = 1; step < 4; ++step) {
    Floats grads(ids.size() * table->dim());
    for (float& grad : grads) grad = normal(random);
    monolith::UpdateOptions options;
    options.learning_rates = rates;
    options.step = step;
    options.event_time = static_cast<std::uint32_t>(100 * step);
    table->apply_gradients(ids, grads.data(), options);
  }
  return table;
}

// Everything that rows hold.
struct Entries {
  Floats values;
  std::vector<Floats> floats;
  std::vector<std::int64_t> steps;

  Entries(const Table& table, std::size_t n) : values(n * table.dim()), steps(n) {
    for (const auto& slot : table.slot_infos()) {
      if (!slot.is_int64) floats.emplace_back(n * slot.width);
    }
  }
  template <typename Pointers>
  Pointers pointers(const Table& table) {
    Pointers pointers{values.data(), {}};
    std::size_t next = 0;
    for (const auto& slot : table.slot_infos()) {
      if (slot.is_int64) {
        pointers.slots.push_back(steps.data());
      } else {
        pointers.slots.push_back(floats[next++].data());
      }
    }
    return pointers;
  }
  bool operator==(const Entries&) const = default;
};

Entries decoded(const Table& table, const std::vector<std::byte>& rows) {
  Entries entries(table, rows.size() / table.row_bytes());
  table.decode(rows, entries.pointers<monolith::EntryArrays>(table));
  return entries;
}

RowBatch copies(const Table& table, const Ids& ids) {
  RowBatch batch;
  std::vector<std::uint8_t> found(ids.size());
  table.copy_rows(ids, reinterpret_cast<bool*>(found.data()), batch);
  for (const std::uint8_t there : found) REQUIRE(there);
  return batch;
}

}  // namespace

TEST("slots are named by segment, in the order of the row") {
  const Table table(config());
  std::vector<std::string> names;
  for (const auto& slot : table.slot_infos()) names.push_back(slot.name);
  CHECK(names == (std::vector<std::string>{"0/m", "0/v", "0/beta1_power", "0/beta2_power", "1/global_step", "2/m", "2/v", "2/beta1_power",
                                           "2/beta2_power"}));
}

TEST("copies have the time and bytes of their rows, in the order of the call") {
  const auto table = trained();
  const Ids ids = all_ids();
  const RowBatch batch = copies(*table, ids);
  CHECK(batch.ids == ids);
  for (const std::uint32_t time : batch.times) CHECK_EQ(time, 300u);
  Floats values(ids.size() * table->dim());
  table->lookup(ids, values.data());
  CHECK(decoded(*table, batch.rows).values == values);
  for (const std::int64_t step : decoded(*table, batch.rows).steps) CHECK_EQ(step, 3);
}

TEST("an id without a row is marked, and its bytes are zero") {
  const auto table = trained();
  RowBatch batch;
  bool found[2];
  table->copy_rows(Ids{-5000, 1}, found, batch);
  CHECK(found[0] && !found[1]);
  CHECK_EQ(batch.times[1], 0u);
  for (std::size_t i = table->row_bytes(); i < 2 * table->row_bytes(); ++i) CHECK(batch.rows[i] == std::byte{0});
}

TEST("decoded rows encode to the same bytes") {
  const auto table = trained();
  const RowBatch batch = copies(*table, all_ids());
  Entries entries = decoded(*table, batch.rows);
  std::vector<std::byte> again(batch.rows.size(), std::byte{0x77});
  table->encode(kIds, entries.pointers<monolith::EntryViews>(*table), again);
  CHECK(again == batch.rows);
  CHECK_THROWS(table->encode(kIds, entries.pointers<monolith::EntryViews>(*table), std::span(again).first(8)), monolith::InvalidArgument);
}

TEST("rows put into another table train on as if they had been there") {
  const auto table = trained();
  const RowBatch batch = copies(*table, all_ids());
  Table other(config());
  other.insert_raw(batch.ids, batch.times, batch.rows);
  CHECK_EQ(other.size(), kIds);
  const float rates[] = {0.1f, 0.5f, 0.1f};
  monolith::UpdateOptions options;
  options.learning_rates = rates;
  options.step = 9;
  const Floats grads(kIds * other.dim(), 0.3f);
  for (Table* one : {table.get(), &other}) one->apply_gradients(all_ids(), grads.data(), options);
  CHECK(copies(other, all_ids()).rows == copies(*table, all_ids()).rows);
}

TEST("rows put in twice replace, and the last of equal ids wins") {
  const auto table = trained();
  RowBatch batch = copies(*table, Ids{-5000, -4909});
  Table other(config());
  batch.ids = {7, 7};
  batch.times = {1, 2};
  other.insert_raw(batch.ids, batch.times, batch.rows);
  CHECK_EQ(other.size(), 1u);
  const RowBatch there = copies(other, Ids{7});
  CHECK(std::memcmp(there.rows.data(), batch.rows.data() + table->row_bytes(), table->row_bytes()) == 0);
  CHECK_EQ(there.times[0], 2u);
}

TEST("a scan gives every row once, in the order of hashes, from any cursor") {
  const auto table = trained();
  monolith::Cursor cursor;
  RowBatch batch;
  std::vector<monolith::Cursor> stops;
  while (table->scan(cursor, batch)) stops.push_back(cursor);
  CHECK_EQ(batch.ids.size(), kIds);
  CHECK_EQ(batch.times.size(), kIds);
  CHECK_EQ(batch.rows.size(), kIds * table->row_bytes());
  Ids sorted = batch.ids, expected = all_ids();
  std::sort(sorted.begin(), sorted.end());
  std::sort(expected.begin(), expected.end());
  CHECK(sorted == expected);
  RowBatch rest;
  monolith::Cursor middle = stops[stops.size() / 2];
  while (table->scan(middle, rest)) {
  }
  CHECK(rest.ids.size() < kIds);
  CHECK(std::equal(rest.ids.rbegin(), rest.ids.rend(), batch.ids.rbegin()));
}
