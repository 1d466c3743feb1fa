// A table file that is written from several tables must be the file of one table that has all their rows.
#include <unistd.h>

#include "check.h"
#include "monolith/error.h"
#include "monolith/table_file.h"
#include "tables.h"

namespace {

std::string path_of(const char* name) { return "/tmp/monolith_writer_" + std::to_string(::getpid()) + name; }

}  // namespace

TEST("several tables become one file") {
  const std::string path = path_of(".table");
  const monolith::Table empty(tables::config());
  {
    monolith::TableFileWriter writer(path, empty.layout(), empty.row_bytes(), "metadata");
    for (std::int64_t first = 0; first < 3000; first += 1000) {
      monolith::Table part(tables::config());
      std::vector<std::int64_t> ids(1000);
      std::vector<float> values(4000);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = first + static_cast<std::int64_t>(i);
        values[4 * i] = static_cast<float>(ids[i]);
      }
      part.assign(ids, values.data(), 7);
      writer.append(part);
    }
    CHECK(::access(path.c_str(), F_OK) != 0);  // not there before it is complete
    CHECK_EQ(writer.finish(empty).rows, 3000u);
  }
  monolith::TableFile file(path);
  CHECK_EQ(file.rows(), 3000u);
  CHECK_EQ(file.metadata(), std::string("metadata"));
  CHECK_EQ(file.state().max_event_time, 0u);  // that of the table given to finish
  monolith::Table all(tables::config());
  file.load_into(all);
  CHECK_EQ(all.size(), 3000u);
  std::vector<float> out(8);
  all.lookup(std::vector<std::int64_t>{0, 2999}, out.data());
  CHECK_EQ(out[4], 2999.0f);
  ::unlink(path.c_str());
}

TEST("a writer that was not finished leaves nothing, and refuses rows of another layout") {
  const std::string path = path_of(".unfinished");
  const monolith::Table table(tables::config());
  {
    monolith::TableFileWriter writer(path, table.layout(), table.row_bytes(), "");
    const monolith::Table wider(tables::config(monolith::OptimizerKind::kSgd, 5));
    CHECK_THROWS(writer.append(wider), monolith::InvalidArgument);
    writer.append(table);
  }
  CHECK(::access(path.c_str(), F_OK) != 0);
}
