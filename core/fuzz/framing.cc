// Any bytes as a stream of records, read whole and in two parts: both must give the same frames, all within the bytes.
#include <algorithm>

#include "fuzz.h"
#include "monolith/framing.h"

namespace {

using namespace monolith;

Bytes sealed(Bytes bytes) {
  for (std::size_t at = 0; bytes.size() - at >= 16;) {
    const auto length = fuzz::read_at<std::uint64_t>(bytes, at);
    fuzz::write_at(bytes, at + 8, masked_crc32c(bytes.data() + at, 8));
    if (length > bytes.size() - at - 16) break;
    fuzz::write_at(bytes, at + 12 + length, masked_crc32c(bytes.data() + at + 12, length));
    at += 16 + length;
  }
  return bytes;
}

bool same(const Frame& one, const Frame& other) {
  return one.start == other.start && one.begin == other.begin && one.end == other.end && one.key == other.key &&
         one.is_instance == other.is_instance && one.damage == other.damage;
}

void check(const Frames& found, std::size_t size) {
  FUZZ_REQUIRE(found.consumed <= size);
  std::size_t before = 0;
  for (const Frame& frame : found.frames) {
    FUZZ_REQUIRE(before <= frame.start && frame.start <= frame.begin && frame.begin <= frame.end && frame.end <= size);
    before = frame.end;
  }
  FUZZ_REQUIRE(!found.lost || !found.frames.empty());
}

void split(const Bytes& bytes, const FramingOptions& options, std::size_t cut) {
  const Frames whole = split_frames(bytes, 0, options, true);
  check(whole, bytes.size());
  const Bytes piece(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(std::min(cut, bytes.size())));
  Frames first = split_frames(piece, 0, options, false);
  check(first, piece.size());
  if (first.lost) return;
  FUZZ_REQUIRE(first.consumed == piece.size() || first.needed > piece.size() - first.consumed);
  const Frames rest = split_frames(bytes, first.consumed, options, true);
  first.frames.insert(first.frames.end(), rest.frames.begin(), rest.frames.end());
  FUZZ_REQUIRE(std::ranges::equal(first.frames, whole.frames, same));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const auto cut = input.take<std::uint16_t>();
  FramingOptions options;
  options.tfrecord = flags & 1;
  options.header = {bool(flags & 2), bool(flags & 4), bool(flags & 8), bool(flags & 16)};
  if (options.header.lagrangex) options.header = {true, false, false, false};
  if (flags & 32) options.max_record_bytes = 100;
  const Bytes bytes = input.rest();
  split(bytes, options, cut);
  if (options.tfrecord) split(sealed(bytes), options, cut);
  return 0;
}
