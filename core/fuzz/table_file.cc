// A table file from anywhere: lengths and counts that lie, with checksums that fit.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "fuzz.h"
#include "monolith/crc32c.h"
#include "monolith/error.h"
#include "monolith/table_file.h"
#include "table_file_format.h"

namespace {

using namespace monolith;
using namespace monolith::table_file;

std::uint32_t crc(const Bytes& bytes, std::size_t begin, std::size_t end) { return crc32c::value(bytes.data() + begin, end - begin); }

// Gives every part that can be found a checksum that fits, and the footer the counts, as a hostile writer would; otherwise nothing
// behind them is ever reached.
Bytes sealed(Bytes bytes) {
  if (bytes.size() < sizeof(FileHeader) + 4) return bytes;
  const auto header = fuzz::read_at<FileHeader>(bytes, 0);
  const std::uint64_t body = sizeof(FileHeader) + std::uint64_t{header.layout_bytes} + header.metadata_bytes;
  if (body + 4 > bytes.size()) return bytes;
  fuzz::write_at(bytes, body, crc(bytes, 0, body));
  std::size_t at = body + 4;
  std::uint64_t blocks = 0;
  std::uint64_t rows = 0;
  while (bytes.size() - at >= sizeof(BlockHeader) && fuzz::read_at<std::uint32_t>(bytes, at) == kBlockMagic) {
    const auto payload = fuzz::read_at<std::uint64_t>(bytes, at + offsetof(BlockHeader, payload_bytes));
    const std::size_t begin = at + sizeof(BlockHeader);
    const std::size_t end = begin + std::min<std::uint64_t>(payload, bytes.size() - begin);
    fuzz::write_at(bytes, at + offsetof(BlockHeader, payload_crc), crc(bytes, begin, end));
    fuzz::write_at(bytes, at + offsetof(BlockHeader, header_crc), crc(bytes, at, at + offsetof(BlockHeader, header_crc)));
    ++blocks;
    rows += fuzz::read_at<std::uint32_t>(bytes, at + offsetof(BlockHeader, rows));
    at = end;
  }
  if (bytes.size() - at >= sizeof(Footer)) {
    fuzz::write_at(bytes, at + offsetof(Footer, blocks), blocks);
    fuzz::write_at(bytes, at + offsetof(Footer, rows), rows);
  }
  if (bytes.size() - at >= 4) fuzz::write_at(bytes, bytes.size() - 4, crc(bytes, at, bytes.size() - 4));
  return bytes;
}

void read(const Bytes& bytes) {
  const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  FUZZ_REQUIRE(fd >= 0 && ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  try {
    TableFile file(path);
    // A row takes at least its id and time.
    FUZZ_REQUIRE(file.rows() <= bytes.size() / 12);
    Table table(fuzz::table_config());
    file.load_into(table);
    FUZZ_REQUIRE(table.size() <= file.rows());
    FUZZ_REQUIRE(file.checksum() == crc32c::value(bytes.data(), bytes.size()));
    Table again(fuzz::table_config());
    TableFile(path).read_into(again, {1000, 3000});
    FUZZ_REQUIRE(again.size() <= table.size());
  } catch (const CorruptFile&) {
  }
  ::close(fd);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes(data, data + size);
  read(bytes);
  read(sealed(bytes));
  return 0;
}
