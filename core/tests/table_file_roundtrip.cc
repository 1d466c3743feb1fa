// A file must load to the table that was saved: rows, optimizer state, times, what the table knows besides. And a file that
// does not fit must be refused before the table is touched.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/table_file.h"
#include "tables.h"

namespace {

using monolith::BucketRange;
using monolith::OptimizerKind;
using monolith::Table;
using monolith::TableFile;
using Ids = std::vector<std::int64_t>;

// A name that no other test has, removed at the end.
struct TemporaryPath {
  std::string path;
  explicit TemporaryPath(const std::string& name) : path("/tmp/monolith_file_" + std::to_string(getpid()) + "_" + name) {}
  ~TemporaryPath() { std::remove(path.c_str()); }
};

Ids numbers(std::int64_t n) {
  Ids ids;
  for (std::int64_t i = 0; i < n; ++i) ids.push_back(i * 77 - 3 * n);
  return ids;
}

void train(Table& table, const Ids& ids, std::uint32_t time, float gradient = 0.7f) {
  const float rate = 0.1f;
  auto options = tables::options(rate);
  options.event_time = time;
  table.apply_gradients(ids, std::vector<float>(ids.size() * table.dim(), gradient).data(), options);
}

monolith::RowBatch rows_of(const Table& table, const Ids& ids) {
  monolith::RowBatch batch;
  std::vector<std::uint8_t> found(ids.size());
  table.copy_rows(ids, reinterpret_cast<bool*>(found.data()), batch);
  return batch;
}

bool equal(const Table& a, const Table& b, const Ids& ids) {
  const auto one = rows_of(a, ids), other = rows_of(b, ids);
  return a.size() == b.size() && one.rows == other.rows && one.times == other.times;
}

}  // namespace

TEST("tables of every size come back as they were") {
  for (const std::int64_t n : {0, 1, 1000, 60000}) {
    const TemporaryPath file("roundtrip");
    Table table(tables::config(OptimizerKind::kAdam));
    const Ids ids = numbers(n);
    train(table, ids, 50);
    if (n > 0) train(table, Ids(ids.begin(), ids.begin() + n / 2 + 1), 60, -2.0f);
    const auto result = monolith::save_table(table, file.path, "{\"kept\": \"verbatim\"}", false);
    CHECK_EQ(result.rows, static_cast<std::uint64_t>(n));
    std::ifstream bytes(file.path, std::ios::binary | std::ios::ate);
    CHECK_EQ(static_cast<std::uint64_t>(bytes.tellg()), result.bytes);
    TableFile saved(file.path);
    CHECK_EQ(saved.rows(), static_cast<std::uint64_t>(n));
    CHECK_EQ(saved.metadata(), std::string("{\"kept\": \"verbatim\"}"));
    CHECK_EQ(saved.layout(), table.layout());
    Table loaded(tables::config(OptimizerKind::kAdam));
    saved.load_into(loaded);
    CHECK(equal(loaded, table, ids));
    CHECK_EQ(loaded.state().updates, table.state().updates);
    CHECK_EQ(loaded.max_event_time(), table.max_event_time());
  }
}

TEST("ranges of buckets together are the table") {
  Table table(tables::config());
  const Ids ids = numbers(5000);
  train(table, ids, 1);
  const std::vector<BucketRange> parts = {{0, 1}, {1, 1700}, {1700, 1700}, {1700, 4096}};
  Table joined(tables::config()), by_reading(tables::config());
  const TemporaryPath whole("whole");
  monolith::save_table(table, whole.path, "", false);
  std::uint64_t rows = 0;
  for (const BucketRange& part : parts) {
    const TemporaryPath file("part");
    rows += monolith::save_table(table, file.path, "", false, part).rows;
    TableFile(file.path).read_into(joined);
    TableFile(whole.path).read_into(by_reading, part);
  }
  CHECK_EQ(rows, 5000u);
  CHECK(equal(joined, table, ids));
  CHECK(equal(by_reading, table, ids));
  const TemporaryPath none("none");
  CHECK_THROWS(monolith::save_table(table, none.path, "", false, {0, 5000}), monolith::InvalidArgument);
  CHECK(!std::ifstream(none.path));
}

TEST("reading into a table that has rows replaces those of the file alone") {
  Table table(tables::config()), other(tables::config());
  train(table, {1, 2}, 5);
  train(other, {2, 3}, 9, -1.0f);
  const TemporaryPath file("merge");
  monolith::save_table(table, file.path, "", false);
  CHECK_EQ(TableFile(file.path).read_into(other), 2u);
  CHECK_EQ(other.size(), 3u);
  const auto merged = rows_of(other, {1, 2, 3});
  CHECK(merged.times == (std::vector<std::uint32_t>{5, 5, 9}));
  CHECK_EQ(other.max_event_time(), 9u);
}

TEST("expired rows can be left out") {
  auto config = tables::config();
  config.default_expiry_seconds = 100;
  Table table(config);
  train(table, {1, 2}, 10);
  train(table, {3}, 200);
  const TemporaryPath file("expired");
  CHECK_EQ(monolith::save_table(table, file.path, "", true).rows, 1u);
  CHECK_EQ(monolith::save_table(table, file.path, "", false).rows, 3u);
  CHECK_EQ(table.size(), 3u);
}

TEST("a file of other rows is refused before the table changes") {
  Table table(tables::config(OptimizerKind::kAdagrad));
  train(table, {1}, 1);
  const TemporaryPath file("layout");
  monolith::save_table(table, file.path, "", false);
  for (auto config : {tables::config(OptimizerKind::kSgd), tables::config(OptimizerKind::kAdagrad, 5)}) {
    Table other(config);
    train(other, {7}, 1);
    CHECK_THROWS(TableFile(file.path).read_into(other), monolith::CorruptFile);
    CHECK_EQ(other.size(), 1u);
  }
}

TEST("a save that cannot be made leaves what was there") {
  Table table(tables::config());
  train(table, {1, 2, 3}, 1);
  const TemporaryPath file("kept");
  monolith::save_table(table, file.path, "first", false);
  CHECK_THROWS(monolith::save_table(table, "/nowhere/at/all", "", false), monolith::IoError);
  CHECK_EQ(TableFile(file.path).metadata(), std::string("first"));
  monolith::save_table(table, file.path, "second", false);
  CHECK_EQ(TableFile(file.path).metadata(), std::string("second"));
  CHECK_THROWS(TableFile("/nowhere/at/all"), monolith::IoError);
}
