#include "monolith/table_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "monolith/bucket_scan.h"
#include "monolith/crc32c.h"
#include "monolith/error.h"
#include "monolith/thread_pool.h"
#include "row_filter.h"

static_assert(std::endian::native == std::endian::little, "table files are little endian and written as they lie in memory");

namespace monolith {
namespace {

constexpr char kMagic[8] = {'M', 'O', 'N', 'O', 'T', 'A', 'B', 'L'};
constexpr std::uint32_t kBlockMagic = 0x4B434C42;   // "BLCK"
constexpr std::uint32_t kFooterMagic = 0x444E4554;  // "TEND"
constexpr std::size_t kBlockTarget = std::size_t{4} << 20;

struct FileHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t row_bytes;
  std::uint32_t layout_bytes;
  std::uint32_t metadata_bytes;
};  // followed by layout, metadata, crc of everything so far
static_assert(sizeof(FileHeader) == 24);

struct BlockHeader {
  std::uint32_t magic;
  std::uint32_t rows;
  std::uint64_t payload_bytes;  // rows * (8 + 4 + row_bytes): ids, times, rows
  std::uint32_t payload_crc;
  std::uint32_t header_crc;  // of the five fields above
};
static_assert(sizeof(BlockHeader) == 24);

struct Footer {
  std::uint32_t magic;
  std::uint32_t segments;
  std::uint64_t blocks;
  std::uint64_t rows;
  std::uint32_t max_event_time;
  std::uint32_t updates;
};  // followed by one float per segment (HashNet scales), crc of footer and scales
static_assert(sizeof(Footer) == 32);

[[noreturn]] void fail(const std::string& path, const char* action) {
  throw IoError(path + ": cannot " + action + ": " + std::strerror(errno));
}

[[noreturn]] void corrupt(const std::string& path, const std::string& what) {
  throw CorruptFile(path + ": " + what + "; the file is damaged or incomplete, use another copy");
}

std::uint32_t crc_of(const void* data, std::size_t n) { return crc32c::extend(0, data, n); }

// Closes on destruction; errors of close() after a successful fsync carry no information.
class File {
 public:
  File(const std::string& path, int flags, mode_t mode = 0) : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC, mode)) {
    if (fd_ < 0) fail(path_, "open");
  }
  ~File() { ::close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int fd() const noexcept { return fd_; }
  const std::string& path() const noexcept { return path_; }

  void write(const void* data, std::size_t n) {
    const char* from = static_cast<const char*>(data);
    while (n > 0) {
      const ssize_t written = ::write(fd_, from, n);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail(path_, "write");
      from += written;
      n -= static_cast<std::size_t>(written);
    }
  }

  void read_at(void* data, std::size_t n, std::uint64_t offset) const {
    char* to = static_cast<char*>(data);
    while (n > 0) {
      const ssize_t got = ::pread(fd_, to, n, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(path_, "read");
      if (got == 0) corrupt(path_, "ends at byte " + std::to_string(offset) + " where more was expected");
      to += got;
      offset += static_cast<std::uint64_t>(got);
      n -= static_cast<std::size_t>(got);
    }
  }

  void sync() {
    if (::fsync(fd_) != 0) fail(path_, "fsync");
  }

 private:
  std::string path_;
  int fd_;
};

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

void write_header(File& file, const Table& table, const std::string& metadata) {
  const std::string layout = table.layout();
  FileHeader header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kTableFileVersion;
  header.row_bytes = table.row_bytes();
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

SaveResult save_table(const Table& table, const std::string& path, const std::string& metadata, bool skip_expired,
                      BucketRange buckets) {
  BucketScan scan(table, buckets);
  const std::uint32_t now = table.max_event_time();
  TemporaryName temporary(path);
  SaveResult result{};
  {
    File file(temporary.name, O_WRONLY | O_CREAT | O_EXCL, 0644);
    write_header(file, table, metadata);
    RowBatch batch;
    std::uint64_t blocks = 0;
    for (bool more = true; more;) {
      more = scan.next(batch);
      if (more && batch.rows.size() < kBlockTarget) continue;
      if (skip_expired) {
        filter_rows(table.row_bytes(), batch, 0,
                    [&](std::int64_t id, std::uint32_t time) { return !table.expired(id, time, now); });
      }
      if (!batch.ids.empty()) {
        write_block(file, batch);
        ++blocks;
        result.rows += batch.ids.size();
      }
      batch.clear();
    }
    write_footer(file, table, blocks, result.rows);
    file.sync();
    result.bytes = static_cast<std::uint64_t>(::lseek(file.fd(), 0, SEEK_CUR));
  }
  temporary.rename_to(path);
  File(directory_of(path), O_RDONLY | O_DIRECTORY).sync();
  return result;
}

struct TableFile::Impl {
  struct BlockPlace {
    std::uint64_t offset;  // of the payload
    BlockHeader header;
  };

  // O_NONBLOCK: opening a named pipe would wait for a writer before its kind can be seen.
  explicit Impl(const std::string& path) : file(path, O_RDONLY | O_NONBLOCK) {}

  File file;
  std::string layout;
  std::string metadata;
  std::uint32_t row_bytes = 0;
  std::uint64_t rows = 0;
  Table::State state;
  std::vector<BlockPlace> blocks;

  // Returns the offset of the first block.
  std::uint64_t read_header(std::uint64_t size);
  void read_blocks(std::uint64_t offset, std::uint64_t size);
  void read_footer(std::uint64_t offset, std::uint64_t size);
  void check_fits(const Table& table) const;
  // Returns how many rows it inserted.
  std::uint64_t load_block(const BlockPlace& block, Table& table, BucketRange buckets) const;
  std::uint64_t load_blocks(Table& table, BucketRange buckets) const;
};

std::uint64_t TableFile::Impl::read_header(std::uint64_t size) {
  FileHeader header;
  if (size < sizeof(header)) corrupt(file.path(), "is " + std::to_string(size) + " bytes long, shorter than any table file");
  file.read_at(&header, sizeof(header), 0);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    throw CorruptFile(file.path() + ": is not a Monolith table file (its first eight bytes are not MONOTABL)");
  }
  if (header.version > kTableFileVersion) {
    throw CorruptFile(file.path() + ": has format version " + std::to_string(header.version) + ", this release reads up to " +
                      std::to_string(kTableFileVersion) + "; upgrade Monolith to read it");
  }
  if (header.version == 0) corrupt(file.path(), "has format version 0");
  const std::uint64_t body = std::uint64_t{header.layout_bytes} + header.metadata_bytes;
  if (sizeof(header) + body + sizeof(std::uint32_t) > size) corrupt(file.path(), "header is longer than the file");
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes.resize(sizeof(header) + body + sizeof(std::uint32_t));
  file.read_at(bytes.data() + sizeof(header), body + sizeof(std::uint32_t), sizeof(header));
  std::uint32_t stored;
  std::memcpy(&stored, bytes.data() + sizeof(header) + body, sizeof(stored));
  if (stored != crc_of(bytes.data(), sizeof(header) + body)) corrupt(file.path(), "header checksum does not match");
  layout = bytes.substr(sizeof(header), header.layout_bytes);
  metadata = bytes.substr(sizeof(header) + header.layout_bytes, header.metadata_bytes);
  row_bytes = header.row_bytes;
  return bytes.size();
}

void TableFile::Impl::read_blocks(std::uint64_t offset, std::uint64_t size) {
  for (;;) {
    BlockHeader header;
    if (size - offset < sizeof(header)) corrupt(file.path(), "ends at byte " + std::to_string(size) + " without a footer");
    file.read_at(&header, sizeof(header), offset);
    if (header.magic == kFooterMagic) return read_footer(offset, size);
    const std::string where = "block " + std::to_string(blocks.size()) + " at byte " + std::to_string(offset);
    if (header.magic != kBlockMagic) corrupt(file.path(), where + " does not start like one");
    if (header.header_crc != crc_of(&header, offsetof(BlockHeader, header_crc))) {
      corrupt(file.path(), where + ": header checksum does not match");
    }
    offset += sizeof(header);
    if (header.rows == 0 || header.payload_bytes != header.rows * (std::uint64_t{12} + row_bytes) ||
        header.payload_bytes > size - offset) {
      corrupt(file.path(), where + ": length does not fit the file");
    }
    blocks.push_back({offset, header});
    rows += header.rows;
    offset += header.payload_bytes;
  }
}

void TableFile::Impl::read_footer(std::uint64_t offset, std::uint64_t size) {
  Footer footer;
  if (size - offset < sizeof(footer) + sizeof(std::uint32_t)) corrupt(file.path(), "footer is cut short");
  file.read_at(&footer, sizeof(footer), offset);
  const std::uint64_t rest = size - offset - sizeof(footer) - sizeof(std::uint32_t);
  if (rest != std::uint64_t{footer.segments} * sizeof(float)) corrupt(file.path(), "footer length does not fit the file");
  std::vector<float>& scales = state.hashnet_scales;
  scales.resize(footer.segments);
  file.read_at(scales.data(), rest, offset + sizeof(footer));
  std::uint32_t stored;
  file.read_at(&stored, sizeof(stored), size - sizeof(stored));
  std::uint32_t crc = crc_of(&footer, sizeof(footer));
  crc = crc32c::extend(crc, scales.data(), rest);
  if (stored != crc) corrupt(file.path(), "footer checksum does not match");
  if (footer.blocks != blocks.size() || footer.rows != rows) {
    corrupt(file.path(), "footer counts " + std::to_string(footer.rows) + " rows, the blocks hold " + std::to_string(rows));
  }
  for (const float scale : scales) {
    if (!(scale >= 0) || !std::isfinite(scale)) corrupt(file.path(), "footer holds an impossible HashNet scale");
  }
  state.max_event_time = footer.max_event_time;
  state.updates = footer.updates;
}

void TableFile::Impl::check_fits(const Table& table) const {
  if (table.layout() != layout) {
    throw CorruptFile(file.path() + ": holds rows of layout [" + layout + "], the table has [" + table.layout() +
                      "]; load it with the configuration it was saved with");
  }
  if (table.row_bytes() != row_bytes || state.hashnet_scales.size() != table.config().segments.size()) {
    corrupt(file.path(), "row size does not fit its own layout");
  }
}

std::uint64_t TableFile::Impl::load_block(const BlockPlace& block, Table& table, BucketRange buckets) const {
  const std::size_t n = block.header.rows;
  RowBatch batch{std::vector<std::int64_t>(n), std::vector<std::uint32_t>(n), std::vector<std::byte>(n * row_bytes)};
  std::uint64_t offset = block.offset;
  std::uint32_t crc = 0;
  const auto read = [&](void* to, std::size_t bytes) {
    file.read_at(to, bytes, offset);
    crc = crc32c::extend(crc, to, bytes);
    offset += bytes;
  };
  read(batch.ids.data(), n * sizeof(batch.ids[0]));
  read(batch.times.data(), n * sizeof(batch.times[0]));
  read(batch.rows.data(), batch.rows.size());
  if (crc != block.header.payload_crc) {
    corrupt(file.path(), "block at byte " + std::to_string(block.offset) + ": checksum does not match");
  }
  if (!buckets.all()) {
    filter_rows(row_bytes, batch, 0, [&](std::int64_t id, std::uint32_t) { return buckets.contains(id); });
  }
  table.insert_raw(batch.ids, batch.times, batch.rows);
  return batch.ids.size();
}

std::uint64_t TableFile::Impl::load_blocks(Table& table, BucketRange buckets) const {
#if defined(__linux__)
  static_cast<void>(::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_SEQUENTIAL));
#endif
  std::atomic<std::uint64_t> inserted{0};
  parallel_for(blocks.size(), [&](std::size_t i) { inserted += load_block(blocks[i], table, buckets); });
  return inserted;
}

TableFile::TableFile(const std::string& path) : impl_(std::make_unique<Impl>(path)) {
  struct stat status;
  if (::fstat(impl_->file.fd(), &status) != 0) fail(path, "stat");
  if (!S_ISREG(status.st_mode)) throw IoError(path + ": is not a regular file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  impl_->read_blocks(impl_->read_header(size), size);
}

TableFile::~TableFile() = default;

const std::string& TableFile::metadata() const noexcept { return impl_->metadata; }

const std::string& TableFile::layout() const noexcept { return impl_->layout; }

std::uint64_t TableFile::rows() const noexcept { return impl_->rows; }

const Table::State& TableFile::state() const noexcept { return impl_->state; }

std::uint64_t TableFile::read_into(Table& table, BucketRange buckets) {
  check_buckets(buckets);
  impl_->check_fits(table);
  return impl_->load_blocks(table, buckets);
}

void TableFile::load_into(Table& table) {
  impl_->check_fits(table);
  if (table.size() != 0) {
    throw InvalidArgument("load_into: expected an empty table, got one with " + std::to_string(table.size()) + " rows");
  }
  impl_->load_blocks(table, {});
  if (table.size() != impl_->rows) corrupt(impl_->file.path(), "holds an id twice");
  table.set_state(impl_->state);
}

}  // namespace monolith
