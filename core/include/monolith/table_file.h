// One table in one file: versioned, every block checksummed; docs/formats.md has the bytes.
//
// Thread-safety: save_table may run while other threads use the table; a TableFile is used by one thread at a time.
// Failure: IoError when the operating system refuses, CorruptFile when the bytes are wrong. A failed save leaves what was at
// `path` before; a failed open or load has changed nothing outside the table being filled.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "monolith/buckets.h"
#include "monolith/table.h"

namespace monolith {

inline constexpr std::uint32_t kTableFileVersion = 1;

struct SaveResult {
  std::uint64_t rows;
  std::uint64_t bytes;
};

// Writes to a temporary name in the same directory, fsyncs, renames over `path`, fsyncs the directory: after it returns the file
// survives power loss. Each row is written whole, as it was at some moment of the call; rows that are there throughout are
// written exactly once. `metadata` is kept verbatim. With skip_expired, rows that evict(max_event_time) would remove are left out.
// Only ids of `buckets` are written. Throws InvalidArgument for buckets that are none.
SaveResult save_table(const Table& table, const std::string& path, const std::string& metadata, bool skip_expired,
                      BucketRange buckets = {});

// Writes one table file from several tables with the same layout(), so that its rows need not be in memory together. No id may
// be in two of them. The file appears under `path` when finish() returns, as after save_table; without it nothing remains.
class TableFileWriter {
 public:
  TableFileWriter(const std::string& path, const std::string& layout, std::uint32_t row_bytes, const std::string& metadata);
  ~TableFileWriter();
  TableFileWriter(const TableFileWriter&) = delete;
  TableFileWriter& operator=(const TableFileWriter&) = delete;

  // Writes the rows of `table` in `buckets`. Throws InvalidArgument for another layout, or for buckets that are none.
  void append(const Table& table, bool skip_expired = false, BucketRange buckets = {});

  // The state of the file becomes that of `table`. Called once, last.
  SaveResult finish(const Table& table);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

class TableFile {
 public:
  // Reads and checks header, footer and the header of every block against the size of the file; no payload yet.
  explicit TableFile(const std::string& path);
  ~TableFile();
  TableFile(const TableFile&) = delete;
  TableFile& operator=(const TableFile&) = delete;

  const std::string& metadata() const noexcept;
  const std::string& layout() const noexcept;
  std::uint64_t rows() const noexcept;
  // CRC-32C of all bytes of the file, derived from the checksums in it. That its blocks have theirs is found out by reading them:
  // a file whose rows were all loaded without an error has this checksum.
  std::uint32_t checksum() const noexcept;

  // Fills an empty table whose layout() equals this file's. Each block's checksum is verified before its rows are used.
  void load_into(Table& table);

  // Upserts the rows of these buckets into a table with the same layout(), which may have others and may be in use; returns how
  // many. What the table knows besides its rows stays. CorruptFile for a damaged block: rows of other blocks are in the table.
  std::uint64_t read_into(Table& table, BucketRange buckets = {});

  // What the saved table knew besides its rows.
  const Table::State& state() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace monolith
