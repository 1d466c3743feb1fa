// Files of records, cut into frames: TFRecord and every header of the original's files. A frame that begins a byte too late
// turns all that follow into noise, and a reader that resumes must find the same frames as one that began at the front.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "hand_written_message.h"
#include "monolith/framing.h"

namespace {

using monolith::Damage;
using monolith::Frame;
using monolith::Frames;
using monolith::FramingOptions;
using monolith::RecordHeader;
using monolith::split_frames;

void put(Bytes& out, std::uint64_t value, int bytes = 8) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<std::uint8_t>(value >> (8 * i)));
}

void put(Bytes& out, const std::string& text) { out.insert(out.end(), text.begin(), text.end()); }

Bytes tfrecord(const std::vector<std::string>& records) {
  Bytes out;
  for (const std::string& record : records) {
    const std::size_t start = out.size();
    put(out, record.size());
    put(out, monolith::masked_crc32c(out.data() + start, 8), 4);
    put(out, record);
    put(out, monolith::masked_crc32c(record.data(), record.size()), 4);
  }
  return out;
}

std::vector<std::string> payloads(const Bytes& data, const std::vector<Frame>& frames) {
  std::vector<std::string> texts;
  for (const Frame& frame : frames) {
    texts.emplace_back(data.begin() + static_cast<std::ptrdiff_t>(frame.begin), data.begin() + static_cast<std::ptrdiff_t>(frame.end));
  }
  return texts;
}

const std::vector<std::string> kRecords = {"first", "", std::string(1000, 'x'), "last"};

// The frames found when the stream comes in pieces of `piece` bytes, the rest of each piece shown again with the next.
std::vector<std::string> in_pieces(const Bytes& data, std::size_t piece, const FramingOptions& options) {
  std::vector<std::string> found;
  Bytes pending;
  for (std::size_t at = 0; at < data.size() || at == 0; at += piece) {
    const std::size_t end = std::min(data.size(), at + piece);
    pending.insert(pending.end(), data.begin() + static_cast<std::ptrdiff_t>(at), data.begin() + static_cast<std::ptrdiff_t>(end));
    const Frames frames = split_frames(pending, 0, options, end == data.size());
    for (const Frame& frame : frames.frames) REQUIRE(frame.damage == Damage::kNone);
    for (const std::string& text : payloads(pending, frames.frames)) found.push_back(text);
    pending.erase(pending.begin(), pending.begin() + static_cast<std::ptrdiff_t>(frames.consumed));
  }
  REQUIRE(pending.empty());
  return found;
}

}  // namespace

TEST("TFRecords are found, whole or in pieces") {
  const Bytes data = tfrecord(kRecords);
  const Frames frames = split_frames(data, 0, {}, true);
  CHECK(payloads(data, frames.frames) == kRecords);
  CHECK_EQ(frames.consumed, data.size());
  CHECK(!frames.lost);
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, std::size_t{16}, std::size_t{500}, data.size()}) {
    CHECK(in_pieces(data, piece, {}) == kRecords);
  }
}

TEST("a frame starts where the one before it ended, and reading can begin at any start") {
  const Bytes data = tfrecord(kRecords);
  const Frames all = split_frames(data, 0, {}, true);
  std::size_t start = 0;
  for (std::size_t i = 0; i < all.frames.size(); ++i) {
    CHECK_EQ(all.frames[i].start, start);
    CHECK_EQ(all.frames[i].begin, start + 12);
    start = all.frames[i].end + 4;
    const Frames rest = split_frames(data, all.frames[i].start, {}, true);
    REQUIRE(rest.frames.size() == all.frames.size() - i);
    CHECK_EQ(rest.frames[0].begin, all.frames[i].begin);
  }
  CHECK_EQ(start, data.size());
}

TEST("what the next frame needs is said, so that a reader asks for enough") {
  const Bytes data = tfrecord({std::string(100, 'a')});
  for (std::size_t n = 1; n < data.size(); ++n) {
    const Bytes part(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(n));
    const Frames frames = split_frames(part, 0, {}, false);
    REQUIRE(frames.frames.empty());
    REQUIRE(frames.consumed == 0);
    REQUIRE(frames.needed > n);
    REQUIRE(frames.needed <= data.size());
    if (n >= 12) REQUIRE(frames.needed == data.size());
  }
}

TEST("records with each header of the original are found") {
  for (int bits = 0; bits < 8; ++bits) {
    FramingOptions options;
    options.tfrecord = false;
    options.header = {false, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0};
    Bytes data;
    for (const std::string& record : kRecords) {
      // A prefix that is not 0 is the size of the sort id; one that is 0 is followed by another number.
      if (options.header.kafka_dump_prefix) {
        put(data, 0);
        put(data, 12345);
      }
      if (options.header.sort_id) {
        put(data, 3);
        put(data, std::string("key"));
      }
      if (options.header.kafka_dump) put(data, 99);
      put(data, record.size());
      put(data, record);
    }
    CHECK(in_pieces(data, 5, options) == kRecords);
    CHECK(in_pieces(data, data.size(), options) == kRecords);
  }
}

TEST("a prefix that has the size of the sort id replaces the size before it") {
  FramingOptions options;
  options.tfrecord = false;
  options.header = {false, true, true, false};
  Bytes data;
  put(data, 4);
  put(data, std::string("sort"));
  put(data, 2);
  put(data, std::string("ab"));
  CHECK(payloads(data, split_frames(data, 0, options, true).frames) == std::vector<std::string>{"ab"});
}

TEST("a lagrangex header says what a record is and where it came from") {
  FramingOptions options;
  options.tfrecord = false;
  options.header.lagrangex = true;
  Bytes data;
  for (const std::uint64_t header : {std::uint64_t{0} | 77u << 8, std::uint64_t{1} | 0xabcdefu << 8}) {
    put(data, header);
    put(data, 1);
    put(data, std::string("r"));
  }
  const Frames frames = split_frames(data, 0, options, true);
  REQUIRE(frames.frames.size() == 2);
  CHECK(frames.frames[0].is_instance);
  CHECK_EQ(frames.frames[0].key, 77u << 8);  // the bits where they are
  CHECK(!frames.frames[1].is_instance);
  CHECK_EQ(frames.frames[1].key, 0xabcdefu << 8);
}

TEST("nothing is a file without records") {
  const Frames frames = split_frames({}, 0, {}, true);
  CHECK(frames.frames.empty());
  CHECK_EQ(frames.consumed, 0u);
  CHECK(!frames.lost);
}

TEST("the masked checksum is the one of TFRecord") {
  // From the format's own description: the CRC-32C of nothing is 0, and masking adds a constant.
  CHECK_EQ(monolith::masked_crc32c("", 0), 0xa282ead8u);
  CHECK(monolith::masked_crc32c("a", 1) != monolith::masked_crc32c("b", 1));
}
