#include "monolith/framing.h"

#include <bit>
#include <cstring>

#include "monolith/crc32c.h"

static_assert(std::endian::native == std::endian::little, "lengths and checksums are read as they lie in memory");

namespace monolith {
namespace {

constexpr std::uint64_t kForbidden = 0xfefefefe;
constexpr std::size_t kTfRecordHeader = 12;
constexpr std::size_t kTfRecordFooter = 4;

// Walks over the header of one record. Every step either has its bytes or notes how many there would have to be.
class Cursor {
 public:
  Cursor(std::span<const std::uint8_t> data, std::size_t start) : data_(data), start_(start), at_(start) {}

  // False if there are not `n` bytes left. n is at most a few bytes more than max_record_bytes, so nothing overflows.
  bool has(std::size_t n) {
    if (data_.size() - at_ >= n) return true;
    needed_ = at_ - start_ + n;
    return false;
  }
  void skip(std::size_t n) { at_ += n; }
  bool take(std::uint64_t& value) {
    if (!has(sizeof value)) return false;
    std::memcpy(&value, data_.data() + at_, sizeof value);
    at_ += sizeof value;
    return true;
  }
  bool take(std::uint32_t& value) {
    if (!has(sizeof value)) return false;
    std::memcpy(&value, data_.data() + at_, sizeof value);
    at_ += sizeof value;
    return true;
  }

  const std::uint8_t* here() const { return data_.data() + at_; }
  std::size_t at() const { return at_; }
  std::size_t needed() const { return needed_; }

 private:
  std::span<const std::uint8_t> data_;
  std::size_t start_;
  std::size_t at_;
  std::size_t needed_ = 0;
};

Damage check_length(std::uint64_t length, const FramingOptions& options) {
  if (length == kForbidden) return Damage::kForbiddenLength;
  return length > options.max_record_bytes ? Damage::kTooLong : Damage::kNone;
}

// Both readers return false if bytes are missing. Damage that hides the rest of the stream ends the frame at once.
bool read_tfrecord(Cursor& cursor, const FramingOptions& options, Frame& frame) {
  if (!cursor.has(kTfRecordHeader)) return false;
  const std::uint32_t crc = masked_crc32c(cursor.here(), sizeof(std::uint64_t));
  std::uint64_t length = 0;
  std::uint32_t stored = 0;
  cursor.take(length);
  cursor.take(stored);
  if (stored != crc) {
    frame.damage = Damage::kLengthChecksum;
    return true;
  }
  if (length > options.max_record_bytes) {
    frame.damage = Damage::kTooLong;
    return true;
  }
  const auto size = static_cast<std::size_t>(length);
  if (!cursor.has(size + kTfRecordFooter)) return false;
  frame.begin = cursor.at();
  frame.end = frame.begin + size;
  const std::uint32_t payload_crc = masked_crc32c(cursor.here(), size);
  cursor.skip(size);
  cursor.take(stored);
  if (stored != payload_crc) frame.damage = Damage::kPayloadChecksum;
  return true;
}

bool skip_sort_id(Cursor& cursor, std::uint64_t size, const FramingOptions& options, Frame& frame) {
  if (size == 0 && !cursor.take(size)) return false;
  frame.damage = check_length(size, options);
  if (frame.damage != Damage::kNone) return true;
  if (!cursor.has(static_cast<std::size_t>(size))) return false;
  cursor.skip(static_cast<std::size_t>(size));
  return true;
}

bool read_header(Cursor& cursor, const FramingOptions& options, Frame& frame) {
  std::uint64_t word = 0;
  if (options.header.lagrangex) {
    if (!cursor.take(word)) return false;
    frame.is_instance = (word & 0xff) == 0;
    frame.key = static_cast<std::uint32_t>(word) & 0xffffff00u;
    return true;
  }
  std::uint64_t sort_id_size = 0;
  if (options.header.kafka_dump_prefix) {
    if (!cursor.take(sort_id_size)) return false;
    if (sort_id_size == 0 && !cursor.take(word)) return false;
  }
  if (options.header.sort_id) {
    if (!skip_sort_id(cursor, sort_id_size, options, frame)) return false;
    if (frame.damage != Damage::kNone) return true;
  }
  return !options.header.kafka_dump || cursor.take(word);
}

bool read_record(Cursor& cursor, const FramingOptions& options, Frame& frame) {
  if (!read_header(cursor, options, frame)) return false;
  if (frame.damage != Damage::kNone) return true;
  std::uint64_t length = 0;
  if (!cursor.take(length)) return false;
  frame.damage = check_length(length, options);
  if (frame.damage != Damage::kNone) return true;
  const auto size = static_cast<std::size_t>(length);
  if (!cursor.has(size)) return false;
  frame.begin = cursor.at();
  frame.end = frame.begin + size;
  cursor.skip(size);
  return true;
}

}  // namespace

std::uint32_t masked_crc32c(const void* data, std::size_t n) noexcept {
  return std::rotr(crc32c::value(data, n), 15) + 0xa282ead8u;
}

Frames split_frames(std::span<const std::uint8_t> data, std::size_t start, const FramingOptions& options, bool last) {
  Frames found{{}, start, 0, false};
  while (found.consumed < data.size() && !found.lost) {
    Cursor cursor(data, found.consumed);
    Frame frame{found.consumed, found.consumed, found.consumed, 0, false, Damage::kNone};
    const bool whole = options.tfrecord ? read_tfrecord(cursor, options, frame) : read_record(cursor, options, frame);
    if (!whole) {
      found.needed = cursor.needed();
      if (!last) break;
      frame.damage = Damage::kTruncated;
    }
    found.lost = frame.damage > Damage::kPayloadChecksum;
    found.consumed = found.lost ? data.size() : cursor.at();
    found.frames.push_back(frame);
  }
  return found;
}

}  // namespace monolith
