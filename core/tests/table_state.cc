// What a table knows besides its rows, saved with them: a run that resumes without it would repeat the draws of stochastic
// rounding, soften its one-bit slopes, or expire rows by an older clock.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::Table;
using Ids = std::vector<std::int64_t>;

void train(Table& table, std::uint32_t time) {
  const float rate = 0.1f;
  auto options = tables::options(rate);
  options.event_time = time;
  table.apply_gradients(Ids{1}, std::vector<float>(table.dim(), 1.0f).data(), options);
}

}  // namespace

TEST("updates are counted, and the newest event time is kept") {
  Table table(tables::config());
  CHECK_EQ(table.state().updates, 0u);
  train(table, 50);
  train(table, 20);
  CHECK_EQ(table.state().updates, 2u);
  CHECK_EQ(table.state().max_event_time, 50u);
  const std::vector<float> values(table.dim());
  table.assign(Ids{2}, values.data(), 70);
  CHECK_EQ(table.max_event_time(), 70u);
  CHECK_EQ(table.state().updates, 2u);  // of gradients alone
}

TEST("a state that was set goes on from there, but never back in time") {
  Table table(tables::config());
  train(table, 50);
  table.set_state({40, 1000, {1.0f}});
  CHECK_EQ(table.state().updates, 1000u);
  CHECK_EQ(table.max_event_time(), 50u);
  table.set_state({60, 0xffffffffu, {1.0f}});
  CHECK_EQ(table.max_event_time(), 60u);
  train(table, 1);
  CHECK_EQ(table.state().updates, 0u);  // modulo 2^32
}

TEST("a state that does not fit is refused and changes nothing") {
  Table table(tables::config());
  train(table, 5);
  for (const std::vector<float>& scales : {std::vector<float>{}, {1.0f, 1.0f}, {-1.0f}, {std::nanf("")}, {INFINITY}}) {
    CHECK_THROWS(table.set_state({99, 99, scales}), monolith::InvalidArgument);
    CHECK_EQ(table.state().updates, 1u);
    CHECK_EQ(table.max_event_time(), 5u);
  }
}

TEST("stochastic rounding goes on with the draws that come next") {
  auto config = tables::config();
  config.segments[0].precision = monolith::Precision::kBf16;
  config.segments[0].stochastic_rounding = true;
  Table through(config), resumed(config), repeated(config);
  for (int i = 0; i < 5; ++i) train(through, 1);
  for (Table* table : {&resumed, &repeated}) {
    monolith::RowBatch rows;
    bool found;
    through.copy_rows(Ids{1}, &found, rows);
    table->insert_raw(rows.ids, rows.times, rows.rows);
  }
  resumed.set_state(through.state());
  for (Table* table : {&through, &resumed, &repeated}) {
    for (int i = 0; i < 40; ++i) train(*table, 1);
  }
  std::vector<float> a(4), b(4), c(4);
  through.lookup(Ids{1}, a.data());
  resumed.lookup(Ids{1}, b.data());
  repeated.lookup(Ids{1}, c.data());
  CHECK(a == b);
  CHECK(a != c);
}
