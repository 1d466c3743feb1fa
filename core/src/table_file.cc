// Writing a table file; reading one is in table_file_reader.cc.
#include "monolith/table_file.h"

#include <memory>
#include <random>
#include <vector>

#include "monolith/bucket_scan.h"
#include "row_filter.h"
#include "table_file_format.h"

namespace monolith {
namespace {

using namespace table_file;

constexpr std::size_t kBlockTarget = std::size_t{4} << 20;

std::string directory_of(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

// Removes the temporary file unless it was renamed into place.
struct TemporaryName {
  explicit TemporaryName(const std::string& path)
      : name(path + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(std::random_device{}())) {}
  ~TemporaryName() {
    if (!name.empty()) ::unlink(name.c_str());
  }
  TemporaryName(const TemporaryName&) = delete;
  TemporaryName& operator=(const TemporaryName&) = delete;

  void rename_to(const std::string& path) {
    if (::rename(name.c_str(), path.c_str()) != 0) fail(path, "rename the finished file to");
    name.clear();
  }
  std::string name;
};

void write_header(File& file, const std::string& layout, std::uint32_t row_bytes, const std::string& metadata) {
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kTableFileVersion;
  header.row_bytes = row_bytes;
  header.layout_bytes = static_cast<std::uint32_t>(layout.size());
  header.metadata_bytes = static_cast<std::uint32_t>(metadata.size());
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += layout;
  bytes += metadata;
  const std::uint32_t crc = crc_of(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&crc), sizeof(crc));
  file.write(bytes.data(), bytes.size());
}

void write_block(File& file, const RowBatch& batch) {
  BlockHeader header{};
  header.magic = kBlockMagic;
  header.rows = static_cast<std::uint32_t>(batch.ids.size());
  const std::size_t id_bytes = batch.ids.size() * sizeof(batch.ids[0]);
  const std::size_t time_bytes = batch.times.size() * sizeof(batch.times[0]);
  header.payload_bytes = id_bytes + time_bytes + batch.rows.size();
  std::uint32_t crc = crc32c::extend(0, batch.ids.data(), id_bytes);
  crc = crc32c::extend(crc, batch.times.data(), time_bytes);
  header.payload_crc = crc32c::extend(crc, batch.rows.data(), batch.rows.size());
  header.header_crc = crc_of(&header, offsetof(BlockHeader, header_crc));
  file.write(&header, sizeof(header));
  file.write(batch.ids.data(), id_bytes);
  file.write(batch.times.data(), time_bytes);
  file.write(batch.rows.data(), batch.rows.size());
#if defined(__linux__)
  // Starts writing out what is there, so that the fsync at the end does not wait for the whole file. Only a hint.
  static_cast<void>(::sync_file_range(file.fd(), 0, 0, SYNC_FILE_RANGE_WRITE));
#endif
}

void write_footer(File& file, const Table& table, std::uint64_t blocks, std::uint64_t rows) {
  const Table::State state = table.state();
  const std::vector<float>& scales = state.hashnet_scales;
  Footer footer{};
  footer.magic = kFooterMagic;
  footer.segments = static_cast<std::uint32_t>(scales.size());
  footer.blocks = blocks;
  footer.rows = rows;
  footer.max_event_time = state.max_event_time;
  footer.updates = state.updates;
  std::uint32_t crc = crc_of(&footer, sizeof(footer));
  crc = crc32c::extend(crc, scales.data(), scales.size() * sizeof(float));
  file.write(&footer, sizeof(footer));
  file.write(scales.data(), scales.size() * sizeof(float));
  file.write(&crc, sizeof(crc));
}

}  // namespace

struct TableFileWriter::Impl {
  Impl(const std::string& path, const std::string& layout)
      : path(path), layout(layout), temporary(path), file(temporary.name, O_WRONLY | O_CREAT | O_EXCL, 0644) {}

  std::string path;
  std::string layout;
  TemporaryName temporary;
  File file;
  std::uint64_t blocks = 0;
  std::uint64_t rows = 0;
};

TableFileWriter::TableFileWriter(const std::string& path, const std::string& layout, std::uint32_t row_bytes,
                                 const std::string& metadata)
    : impl_(std::make_unique<Impl>(path, layout)) {
  write_header(impl_->file, layout, row_bytes, metadata);
}

TableFileWriter::~TableFileWriter() = default;

void TableFileWriter::append(const Table& table, bool skip_expired, BucketRange buckets) {
  if (table.layout() != impl_->layout) throw InvalidArgument("table: its rows are of another layout than the file");
  BucketScan scan(table, buckets);
  const std::uint32_t now = table.max_event_time();
  RowBatch batch;
  for (bool more = true; more;) {
    more = scan.next(batch);
    if (more && batch.rows.size() < kBlockTarget) continue;
    if (skip_expired) {
      filter_rows(table.row_bytes(), batch, 0,
                  [&](std::int64_t id, std::uint32_t time) { return !table.expired(id, time, now); });
    }
    if (!batch.ids.empty()) {
      write_block(impl_->file, batch);
      ++impl_->blocks;
      impl_->rows += batch.ids.size();
    }
    batch.clear();
  }
}

SaveResult TableFileWriter::finish(const Table& table) {
  File& file = impl_->file;
  write_footer(file, table, impl_->blocks, impl_->rows);
  file.sync();
  const auto bytes = static_cast<std::uint64_t>(::lseek(file.fd(), 0, SEEK_CUR));
  impl_->temporary.rename_to(impl_->path);
  File(directory_of(impl_->path), O_RDONLY | O_DIRECTORY).sync();
  return {impl_->rows, bytes};
}

SaveResult save_table(const Table& table, const std::string& path, const std::string& metadata, bool skip_expired,
                      BucketRange buckets) {
  check_buckets(buckets);
  TableFileWriter writer(path, table.layout(), table.row_bytes(), metadata);
  writer.append(table, skip_expired, buckets);
  return writer.finish(table);
}

}  // namespace monolith
