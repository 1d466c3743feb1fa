// Every allocation of every writing call is made to fail in turn. The table must stay whole: each row as before or fully
// updated, every known id found, and the same call works afterwards.
#include "check.h"
#include "failing_new.h"
#include "monolith/thread_pool.h"
#include "tables.h"

namespace {

constexpr std::uint32_t kDim = 4;

std::vector<std::int64_t> range(std::int64_t first, std::size_t n) {
  std::vector<std::int64_t> ids(n);
  for (std::size_t i = 0; i < n; ++i) ids[i] = first + static_cast<std::int64_t>(i);
  return ids;
}

std::unique_ptr<monolith::Table> filled() {
  auto table = std::make_unique<monolith::Table>(tables::config());
  const auto ids = range(0, 2000);
  const std::vector<float> values(ids.size() * kDim, 3.0f);
  table->assign(ids, values.data(), 5);
  return table;
}

// Old ids hold 3 or, where the call reached them, 4; new ids 0 (their initial value, no row or a fresh one) or 1.
void verify(monolith::Table& table) {
  const auto check = [&](const std::vector<std::int64_t>& ids, float before, float after) {
    std::vector<float> out(ids.size() * kDim);
    table.lookup(ids, out.data());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const float* row = out.data() + i * kDim;
      REQUIRE(row[0] == before || row[0] == after);
      for (std::uint32_t j = 1; j < kDim; ++j) REQUIRE(row[j] == row[0]);
    }
  };
  check(range(0, 2000), 3, 4);
  check(range(2000, 3000), 0, 1);
  std::size_t scanned = 0;
  monolith::Cursor cursor;
  monolith::RowBatch batch;
  while (table.scan(cursor, batch)) {
  }
  scanned = batch.ids.size();
  CHECK_EQ(scanned, table.size());
}

}  // namespace

TEST("apply_gradients under failing allocations") {
  monolith::set_num_threads(1);
  const auto ids = range(0, 5000);
  const std::vector<float> grads(ids.size() * kDim, -1.0f);
  const float rate = 1;
  const auto failed = failing_new::each_allocation(
      filled, [&](auto& table) { table->apply_gradients(ids, grads.data(), tables::options(rate)); },
      [&](auto& table) {
        verify(*table);
        table->apply_gradients(range(9000, 100), grads.data(), tables::options(rate));
      });
  CHECK(failed > 100);
}

TEST("assign_add under failing allocations") {
  const auto ids = range(0, 5000);
  const std::vector<float> ones(ids.size() * kDim, 1.0f);
  const auto failed = failing_new::each_allocation(
      filled, [&](auto& table) { table->assign_add(ids, ones.data(), 6); }, [&](auto& table) { verify(*table); });
  CHECK(failed > 100);
}

TEST("clear under failing allocations leaves all rows or none of a shard, and a usable table") {
  const auto failed = failing_new::each_allocation(
      filled, [&](auto& table) { table->clear(); },
      [&](auto& table) {
        const auto ids = range(0, 2000);
        const std::vector<float> values(ids.size() * kDim, 3.0f);
        table->assign(ids, values.data(), 5);
        verify(*table);
      });
  CHECK(failed > 0);
}
