// The bytes of a table file are a contract with every file users have. This checksum may change only together with
// kTableFileVersion and a reader for the old version.
#include <unistd.h>

#include <fstream>
#include <iterator>

#include "check.h"
#include "monolith/crc32c.h"
#include "monolith/table_file.h"
#include "tables.h"

namespace {

std::string save_small(const std::string& path) {
  monolith::Table table(tables::config(monolith::OptimizerKind::kAdagrad, 2));
  const std::vector<std::int64_t> ids = {0, -1, 42, INT64_MIN, INT64_MAX};
  const std::vector<float> values = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  table.assign(ids, values.data(), 1700000000);
  monolith::save_table(table, path, "{\"name\":\"golden\"}", false);
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST("the bytes of a small table file are pinned") {
  const std::string path = "/tmp/monolith_golden_" + std::to_string(::getpid()) + ".table";
  const std::string bytes = save_small(path);
  CHECK_EQ(bytes.size(), 292u);
  CHECK_EQ(monolith::crc32c::extend(0, bytes.data(), bytes.size()), 2081552574u);
  monolith::TableFile file(path);
  CHECK_EQ(file.checksum(), 2081552574u);  // derived from its parts
  CHECK_EQ(file.metadata(), std::string("{\"name\":\"golden\"}"));
  monolith::Table table(tables::config(monolith::OptimizerKind::kAdagrad, 2));
  file.load_into(table);
  const std::vector<std::int64_t> ids = {INT64_MAX, 42};
  std::vector<float> out(4);
  table.lookup(ids, out.data());
  CHECK_EQ(out[0], 9.0f);
  CHECK_EQ(out[3], 6.0f);
  CHECK_EQ(table.max_event_time(), 1700000000u);
  ::unlink(path.c_str());
}
