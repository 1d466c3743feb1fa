// The parts of a table file, in the order they are written, and the descriptor they go through; docs/formats.md has the bytes.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "monolith/crc32c.h"
#include "monolith/error.h"

namespace monolith::table_file {

static_assert(std::endian::native == std::endian::little, "table files are little endian and written as they lie in memory");

inline constexpr char kMagic[8] = {'M', 'O', 'N', 'O', 'T', 'A', 'B', 'L'};
inline constexpr std::uint32_t kBlockMagic = 0x4B434C42;   // "BLCK"
inline constexpr std::uint32_t kFooterMagic = 0x444E4554;  // "TEND"

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

[[noreturn]] inline void fail(const std::string& path, const char* action) {
  throw IoError(path + ": cannot " + action + ": " + std::strerror(errno));
}

[[noreturn]] inline void corrupt(const std::string& path, const std::string& what) {
  throw CorruptFile(path + ": " + what + "; the file is damaged or incomplete, use another copy");
}

inline std::uint32_t crc_of(const void* data, std::size_t n) { return crc32c::extend(0, data, n); }

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

}  // namespace monolith::table_file
