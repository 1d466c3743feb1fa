// Reading a table file; writing one is in table_file.cc.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "bulk_reads.h"
#include "monolith/bucket_scan.h"
#include "monolith/table_file.h"
#include "monolith/thread_pool.h"
#include "read_ahead.h"
#include "row_filter.h"
#include "table_file_format.h"

namespace monolith {

using namespace table_file;

namespace {

// Read and not yet being inserted. Two would do if disk and processor were always equally quick.
constexpr std::size_t kBlocksAhead = 3;

}  // namespace

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
  std::uint32_t checksum = 0;
  Table::State state;
  std::vector<BlockPlace> blocks;

  // Returns the offset of the first block.
  std::uint64_t read_header(std::uint64_t size);
  void read_blocks(std::uint64_t offset, std::uint64_t size);
  void read_footer(std::uint64_t offset, std::uint64_t size);
  void check_fits(const Table& table) const;
  const BlockPlace& block_at(std::size_t number, std::size_t streams) const;
  void check_block(const BlockPlace& block, const std::byte* bytes) const;
  // These return how many rows they inserted.
  std::uint64_t insert_block(const BlockPlace& block, std::byte* bytes, Table& table, BucketRange buckets) const;
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
  checksum = crc_of(bytes.data(), bytes.size());
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
    checksum = crc32c::combine(crc32c::extend(checksum, &header, sizeof(header)), header.payload_crc, header.payload_bytes);
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
  checksum = crc32c::combine(checksum, crc32c::extend(crc, &stored, sizeof(stored)), size - offset);
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

const TableFile::Impl::BlockPlace& TableFile::Impl::block_at(std::size_t number, std::size_t streams) const {
  // Neighbours in the file are neighbours in the table: those who insert at the same time are sent to different parts of it.
  const std::size_t stream = number % streams;
  return blocks[stream * (blocks.size() / streams) + std::min(stream, blocks.size() % streams) + number / streams];
}

void TableFile::Impl::check_block(const BlockPlace& block, const std::byte* bytes) const {
  if (crc_of(bytes, block.header.payload_bytes) != block.header.payload_crc) {
    corrupt(file.path(), "block at byte " + std::to_string(block.offset) + ": checksum does not match");
  }
}

std::uint64_t TableFile::Impl::insert_block(const BlockPlace& block, std::byte* bytes, Table& table, BucketRange buckets) const {
  const std::size_t n = block.header.rows;
  // Ids and times are copied because they may lie at odd places in memory.
  std::vector<std::int64_t> ids(n);
  std::vector<std::uint32_t> times(n);
  std::memcpy(ids.data(), bytes, 8 * n);
  std::memcpy(times.data(), bytes + 8 * n, 4 * n);
  RowArrays rows{ids.data(), times.data(), bytes + 12 * n, n};
  if (!buckets.all()) {
    rows.size = keep_rows(row_bytes, rows, 0, [&](std::int64_t id, std::uint32_t) { return buckets.contains(id); });
  }
  table.insert_raw({rows.ids, rows.size}, {rows.times, rows.size}, {rows.rows, rows.size * row_bytes});
  return rows.size;
}

std::uint64_t TableFile::Impl::load_blocks(Table& table, BucketRange buckets) const {
  if (blocks.empty()) return 0;
  const std::size_t streams = std::min(num_threads(), blocks.size());
  std::atomic<std::uint64_t> inserted{0};
  BulkReads reads(file, blocks.back().offset + blocks.back().header.payload_bytes);
  ReadAhead ahead(blocks.size(), streams + kBlocksAhead, [&](ReadAhead::Piece& piece) {
    const BlockPlace& block = block_at(piece.number, streams);
    piece.data = reads.read(piece, block.header.payload_bytes, block.offset);
    check_block(block, piece.data);
  });
  parallel_for(streams, [&](std::size_t) {
    std::unique_ptr<ReadAhead::Piece> piece;
    while (ahead.next(piece)) inserted += insert_block(block_at(piece->number, streams), piece->data, table, buckets);
  });
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

std::uint32_t TableFile::checksum() const noexcept { return impl_->checksum; }

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
