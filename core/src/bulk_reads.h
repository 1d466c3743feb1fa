// Reading large parts of a file that will not be read again soon: past the page cache where the system allows it and the file is
// not there already. The cache would only cost: a copy of every byte, and the memory of what others read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "read_ahead.h"
#include "table_file_format.h"

namespace monolith {

// One at a time for a file, which must outlive it and is not read otherwise meanwhile. Used by one thread at a time.
class BulkReads {
 public:
  // `size` is that of the file in bytes.
  BulkReads(const table_file::File& file, std::uint64_t size);
  ~BulkReads() { use_cache(); }
  BulkReads(const BulkReads&) = delete;
  BulkReads& operator=(const BulkReads&) = delete;

  // n bytes from `offset`, somewhere in the memory of `piece`, at any alignment. Throws as File::read_at.
  std::byte* read(ReadAhead::Piece& piece, std::size_t n, std::uint64_t offset);

 private:
  void use_cache() noexcept;
  // At least `wanted` bytes of these pages, the last of which may end with the file; false if that cannot be.
  bool read_pages(std::byte* to, std::size_t pages, std::size_t wanted, std::uint64_t offset) noexcept;

  const table_file::File& file_;
  bool direct_ = false;  // past the cache
};

}  // namespace monolith
