#include "bulk_reads.h"

#include <algorithm>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace monolith {
namespace {

// Enough for every device and file system we know; one that wants more refuses the first read, and the cache is used.
constexpr std::uint64_t kAlignment = 4096;
// Below this there is nothing to gain.
constexpr std::uint64_t kSmallest = std::uint64_t{16} << 20;

#if defined(__linux__)

// Whether most of the file is in the page cache, judged by pages at regular distances.
bool is_cached(int fd, std::uint64_t size) noexcept {
  constexpr std::uint64_t kProbes = 64;
  void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return true;
  std::uint64_t found = 0;
  for (std::uint64_t i = 0; i < kProbes; ++i) {
    const std::uint64_t offset = size / kProbes * i / kAlignment * kAlignment;
    unsigned char resident = 0;
    found += ::mincore(static_cast<char*>(mapped) + offset, 1, &resident) != 0 || (resident & 1u) != 0;
  }
  ::munmap(mapped, size);
  return found > kProbes / 2;
}

#endif

}  // namespace

BulkReads::BulkReads(const table_file::File& file, std::uint64_t size) : file_(file) {
#if defined(__linux__)
  static_cast<void>(::posix_fadvise(file_.fd(), 0, 0, POSIX_FADV_SEQUENTIAL));
  if (size < kSmallest || is_cached(file_.fd(), size)) return;
  const int flags = ::fcntl(file_.fd(), F_GETFL);
  direct_ = flags >= 0 && ::fcntl(file_.fd(), F_SETFL, flags | O_DIRECT) == 0;
#else
  static_cast<void>(size);
#endif
}

void BulkReads::use_cache() noexcept {
#if defined(__linux__)
  if (direct_) static_cast<void>(::fcntl(file_.fd(), F_SETFL, ::fcntl(file_.fd(), F_GETFL) & ~O_DIRECT));
#endif
  direct_ = false;
}

bool BulkReads::read_pages(std::byte* to, std::size_t pages, std::size_t wanted, std::uint64_t offset) noexcept {
  for (std::size_t done = 0; done < wanted;) {
    const ssize_t got = ::pread(file_.fd(), to + done, pages - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += static_cast<std::size_t>(got);
  }
  return true;
}

std::byte* BulkReads::read(ReadAhead::Piece& piece, std::size_t n, std::uint64_t offset) {
  if (direct_) {
    // The pages around the bytes. Memory for less than kHugeArrayFrom would not be aligned to pages itself.
    const std::size_t before = offset % kAlignment;
    const std::size_t pages = (before + n + kAlignment - 1) / kAlignment * kAlignment;
    std::byte* const to = piece.room(std::max(pages, kHugeArrayFrom));
    if (read_pages(to, pages, before + n, offset - before)) return to + before;
    use_cache();  // which works, or tells what is wrong
  }
  std::byte* const to = piece.room(n);
  file_.read_at(to, n, offset);
  return to;
}

}  // namespace monolith
