// Cuts a stream of bytes into records: TFRecord files, and the original's record files with any of their headers.
//
// TFRecord:  u64 length | u32 masked CRC-32C of the length | payload | u32 masked CRC-32C of the payload
// Records:   header (see RecordHeader) | u64 length | payload
// All integers are little endian.
//
// The stream comes in pieces: split_frames takes what is there and says where to go on. Damage is part of the answer, not an
// exception, because only the caller knows how much of it to accept.
//
// Thread-safety: pure functions. Ownership: nothing is kept; frames are positions inside `data`. Units: bytes.
// Failure: std::bad_alloc. No length in the data makes us allocate: memory is bounded by 40 bytes per frame found, and a frame
// takes at least 8 bytes of data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace monolith {

// What stands before the length of a record, in this order.
struct RecordHeader {
  // One u64: message type in the low byte (0 Instance, otherwise Example), data source key in the bits 8..31. Excludes the others.
  bool lagrangex = false;
  // One u64: if 0, another one follows and is ignored; otherwise it is the size of the sort id.
  bool kafka_dump_prefix = false;
  // Size of the sort id (unless the prefix had it), then that many bytes, ignored.
  bool sort_id = false;
  // One u64, ignored.
  bool kafka_dump = false;
};

struct FramingOptions {
  bool tfrecord = true;  // otherwise records with `header`
  RecordHeader header;
  std::size_t max_record_bytes = std::size_t{128} << 20;
};

enum class Damage : std::uint8_t {
  kNone,
  kPayloadChecksum,  // this record is lost, the next one begins where it should
  // After these nothing further can be found in the stream.
  kLengthChecksum,
  kTooLong,
  kForbiddenLength,  // 0xfefefefe: the file was never finished
  kTruncated,
};

struct Frame {
  std::size_t start;     // of the header; the next frame starts where this one ends
  std::size_t begin;     // of the payload
  std::size_t end;       // of the payload
  std::uint32_t key;     // data source key, of a lagrangex header
  bool is_instance;      // of a lagrangex header
  Damage damage;
};

struct Frames {
  std::vector<Frame> frames;
  std::size_t consumed;  // bytes of data that need not be shown again
  std::size_t needed;    // bytes from `consumed` on that the next frame needs at least
  bool lost;             // the last frame has damage that hides everything after it
};

// The frames of data[start..]. `last`: no bytes follow `data`, so an unfinished record is truncated.
Frames split_frames(std::span<const std::uint8_t> data, std::size_t start, const FramingOptions& options, bool last);

// CRC-32C, rotated and offset as TFRecord stores it, so that a checksum of bytes that hold checksums stays strong.
std::uint32_t masked_crc32c(const void* data, std::size_t n) noexcept;

}  // namespace monolith
