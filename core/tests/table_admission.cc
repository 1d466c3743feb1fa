// A table asks its filter about ids without a row, and only then. If it asked about others their counts would decide nothing
// and cost memory; if it forgot to ask, every id of the stream would get a row.
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "monolith/admission.h"
#include "tables.h"

namespace {

using monolith::SlidingFilter;
using monolith::SlotThresholds;
using monolith::Table;
using Ids = std::vector<std::int64_t>;

std::shared_ptr<SlidingFilter> filter(std::uint32_t threshold) {
  return std::make_shared<SlidingFilter>(10000, 5, SlotThresholds(threshold));
}

void train(Table& table, const Ids& ids) {
  const float rate = 1;
  table.apply_gradients(ids, std::vector<float>(ids.size() * table.dim(), -1.0f).data(), tables::options(rate));
}

float value(const Table& table, std::int64_t id) {
  std::vector<float> out(table.dim());
  table.lookup(Ids{id}, out.data());
  return out[0];
}

}  // namespace

TEST("an id gets a row when it has come often enough, and is trained from then on") {
  Table table(tables::config(), filter(2));
  for (int time = 1; time <= 5; ++time) {
    train(table, {7});
    CHECK_EQ(table.size(), time <= 2 ? 0u : 1u);
    CHECK_EQ(value(table, 7), time <= 2 ? 0.0f : static_cast<float>(time - 2));
  }
}

TEST("copies in one batch are one decision and count as many") {
  Table table(tables::config(), filter(3));
  train(table, {7, 7, 7, 7});  // none had come before
  CHECK_EQ(table.size(), 0u);
  train(table, {7});
  CHECK_EQ(table.size(), 1u);
  CHECK_EQ(value(table, 7), 1.0f);
}

TEST("ids that are let in and ids that are not do not disturb each other") {
  auto shared = filter(1);
  Table table(tables::config(), shared);
  Ids old, fresh, mixed;
  for (std::int64_t i = 0; i < 300; ++i) {
    old.push_back(i * 2);
    fresh.push_back(i * 2 + 1);
    mixed.push_back(i * 2);
    mixed.push_back(i * 2 + 1);
  }
  train(table, old);
  train(table, old);
  CHECK_EQ(table.size(), 300u);
  train(table, mixed);
  CHECK_EQ(table.size(), 300u);
  for (const std::int64_t id : old) REQUIRE(value(table, id) == 2.0f);
  for (const std::int64_t id : fresh) REQUIRE(value(table, id) == 0.0f);
  train(table, fresh);
  CHECK_EQ(table.size(), 600u);
  for (const std::int64_t id : fresh) REQUIRE(value(table, id) == 1.0f);
}

TEST("a row that is there is never asked about") {
  auto shared = filter(1);
  Table table(tables::config(), shared);
  train(table, {7});
  train(table, {7});
  const std::uint32_t count = shared->get(7);
  for (int i = 0; i < 5; ++i) train(table, {7});
  CHECK_EQ(shared->get(7), count);
}

TEST("assignments of new ids are asked about, reinitialisation is not") {
  Table table(tables::config(), filter(1));
  const std::vector<float> ones(table.dim(), 1.0f);
  table.assign(Ids{1}, ones.data(), 0);
  table.assign_add(Ids{2}, ones.data(), 0);
  CHECK_EQ(table.size(), 0u);
  table.assign(Ids{1}, ones.data(), 0);
  CHECK_EQ(table.size(), 1u);
  std::int32_t existed;
  table.reinitialize(Ids{3}, 0, &existed);
  CHECK_EQ(table.size(), 2u);
  CHECK_EQ(existed, 0);
}

TEST("an id that was erased has to be let in again") {
  Table table(tables::config(), filter(1));
  train(table, {7});
  train(table, {7});
  bool erased;
  table.erase(Ids{7}, &erased);
  CHECK(erased);
  train(table, {7});
  CHECK_EQ(table.size(), 1u);  // its count is still there: it came often enough
}

TEST("tables can share a filter") {
  auto shared = filter(1);
  Table first(tables::config(), shared), second(tables::config(), shared);
  train(first, {7});
  train(second, {7});
  CHECK_EQ(first.size(), 0u);
  CHECK_EQ(second.size(), 1u);
}
