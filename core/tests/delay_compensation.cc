// A gradient that was computed some steps ago is corrected by how far its row has moved since: g + lambda * g * g * (w -
// snapshot). The snapshot is found by the place of the id in the call, so a mistake there would correct a row by the movement
// of another.
#include <cstdint>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::Table;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

monolith::TableConfig config(float lambda) {
  auto config = tables::config(monolith::OptimizerKind::kSgd, 2);
  config.segments[0].optimizer.delay_compensation = lambda;
  return config;
}

Floats values(const Table& table, const Ids& ids) {
  Floats out(ids.size() * 2);
  table.lookup(ids, out.data());
  return out;
}

void apply(Table& table, const Ids& ids, const Floats& grads, const Floats& snapshot, bool sequential = false) {
  const float rate = 1;
  auto options = tables::options(rate);
  options.snapshot = snapshot.empty() ? nullptr : snapshot.data();
  options.sequential = sequential;
  table.apply_gradients(ids, grads.data(), options);
}

float compensated(float w, float g, float snapshot, float lambda) { return w - (g + lambda * g * g * (w - snapshot)); }

}  // namespace

TEST("a gradient is corrected by the movement of its own row") {
  Table table(config(0.5f));
  Ids ids;
  Floats start, grads, snapshot;
  for (std::int64_t id = 0; id < 300; ++id) {
    ids.push_back(id * 13 % 1000);
    for (int d = 0; d < 2; ++d) {
      start.push_back(static_cast<float>(id) / 100 + static_cast<float>(d));
      grads.push_back(static_cast<float>(id % 7) - 3);
      snapshot.push_back(static_cast<float>(id % 5));
    }
  }
  table.assign(ids, start.data(), 0);
  apply(table, ids, grads, snapshot);
  const Floats out = values(table, ids);
  for (std::size_t i = 0; i < out.size(); ++i) CHECK_NEAR(out[i], compensated(start[i], grads[i], snapshot[i], 0.5f), 1e-4);
}

TEST("a row that has not moved, or a strength of zero, changes nothing") {
  for (const float lambda : {0.0f, 0.5f}) {
    Table table(config(lambda)), plain(config(0));
    const Ids ids = {1, 2};
    const Floats start = {1, 2, 3, 4}, grads = {1, -1, 2, -2};
    for (Table* one : {&table, &plain}) one->assign(ids, start.data(), 0);
    apply(table, ids, grads, lambda == 0 ? Floats{9, 9, 9, 9} : start);
    apply(plain, ids, grads, {});
    CHECK(values(table, ids) == values(plain, ids));
  }
}

TEST("copies of an id are summed and corrected with the snapshot of the first") {
  Table table(config(0.5f));
  table.assign(Ids{1}, Floats{1, 1}.data(), 0);
  apply(table, {1, 1}, {1, 2, 3, 4}, {0.5f, 0.5f, 99, 99});
  CHECK_NEAR(values(table, {1})[0], compensated(1, 4, 0.5f, 0.5f), 1e-5);
  CHECK_NEAR(values(table, {1})[1], compensated(1, 6, 0.5f, 0.5f), 1e-5);
}

TEST("one step for each copy uses the snapshot of each") {
  Table table(config(0.5f));
  table.assign(Ids{1}, Floats{1, 1}.data(), 0);
  apply(table, {1, 1}, {1, 0, 1, 0}, {0.5f, 0, -0.5f, 0}, true);
  const float once = compensated(1, 1, 0.5f, 0.5f);
  CHECK_NEAR(values(table, {1})[0], compensated(once, 1, -0.5f, 0.5f), 1e-5);
}

TEST("a snapshot goes with gradients of ids, not of bags") {
  Table table(config(0.5f));
  const Ids ids = {1, 2}, offsets = {0, 2};
  const Floats grads = {1, 1}, snapshot = {0, 0, 0, 0};
  const float rate = 1;
  monolith::TableUpdate update{&table, ids, offsets, monolith::Pooling::kSum, grads.data(), 2, tables::options(rate)};
  update.options.snapshot = snapshot.data();
  CHECK_THROWS(monolith::apply_many({&update, 1}), monolith::InvalidArgument);
  CHECK_EQ(table.size(), 0u);
}
