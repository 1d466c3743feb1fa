// Reads past the page cache go by whole pages of the file: bytes before or after the range, or a last page that is not full, must
// not get into the result. Where the file system refuses such reads the same calls read through the cache.
#include "bulk_reads.h"

#include <sys/stat.h>

#include <random>
#include <vector>

#include "check.h"

using monolith::BulkReads;
using monolith::ReadAhead;
using monolith::table_file::File;

namespace {

struct Scratch {
  Scratch() : path("/tmp/monolith_bulk_reads_" + std::to_string(::getpid())) {}
  ~Scratch() { ::unlink(path.c_str()); }
  std::string path;
};

std::vector<unsigned char> write_random(const std::string& path, std::size_t size) {
  std::mt19937_64 random(11);
  std::vector<unsigned char> bytes(size);
  for (std::size_t i = 0; i + 8 <= size; i += 8) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, 8);
  }
  File file(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  file.write(bytes.data(), size);
  file.sync();
  return bytes;
}

void check_reads(const std::string& path, const std::vector<unsigned char>& bytes) {
  const File file(path, O_RDONLY);
  BulkReads reads(file, bytes.size());
  ReadAhead::Piece piece;
  std::mt19937_64 random(12);
  const auto same = [&](std::size_t offset, std::size_t n) {
    return std::memcmp(reads.read(piece, n, offset), bytes.data() + offset, n) == 0;
  };
  for (int i = 0; i < 40; ++i) {
    const std::size_t offset = random() % bytes.size();
    CHECK(same(offset, random() % std::min<std::size_t>(bytes.size() - offset, i % 2 == 0 ? 5000 : 6 << 20)));
  }
  for (const std::size_t offset : {std::size_t{0}, std::size_t{4096}, std::size_t{4095}, bytes.size() - 1, bytes.size() - 9000}) {
    CHECK(same(offset, 1));
    CHECK(same(offset, bytes.size() - offset));
  }
  // Beyond the end: the file became shorter since its size was known.
  CHECK_THROWS(reads.read(piece, 10, bytes.size() - 5), monolith::CorruptFile);
  CHECK_THROWS(reads.read(piece, 10, bytes.size() + 5000), monolith::CorruptFile);
  CHECK(same(77, 1000));
}

}  // namespace

TEST("a file that is not cached, one that is, and a small one read the same") {
  const Scratch scratch;
  for (const std::size_t size : {(std::size_t{17} << 20) + 1234, std::size_t{50'000}}) {
    const std::vector<unsigned char> bytes = write_random(scratch.path, size);
    for (const bool cold : {false, true}) {
#if defined(__linux__)
      if (cold) ::posix_fadvise(File(scratch.path, O_RDONLY).fd(), 0, 0, POSIX_FADV_DONTNEED);
#endif
      check_reads(scratch.path, bytes);
    }
  }
}
