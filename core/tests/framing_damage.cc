// A length is the first thing a damaged file lies about. It must neither be believed nor lead past the end of the bytes.
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/framing.h"

using monolith::Damage;
using monolith::Frames;
using monolith::FramingOptions;
using Bytes = std::vector<std::uint8_t>;

namespace {

template <typename T>
void put(Bytes& out, T value) {
  std::uint8_t raw[sizeof value];
  std::memcpy(raw, &value, sizeof value);
  out.insert(out.end(), raw, raw + sizeof value);
}

void put_tfrecord(Bytes& out, const std::string& payload) {
  const std::size_t start = out.size();
  put<std::uint64_t>(out, payload.size());
  put(out, monolith::masked_crc32c(out.data() + start, 8));
  out.insert(out.end(), payload.begin(), payload.end());
  put(out, monolith::masked_crc32c(payload.data(), payload.size()));
}

FramingOptions records(monolith::RecordHeader header = {}) { return {false, header, 1000}; }

std::string payload(const Bytes& data, const monolith::Frame& frame) {
  return {data.begin() + static_cast<std::ptrdiff_t>(frame.begin), data.begin() + static_cast<std::ptrdiff_t>(frame.end)};
}

}  // namespace

TEST("TFRecord: a stream in two pieces, cut anywhere, has the same records") {
  Bytes data;
  for (const char* text : {"one", "", "three three"}) put_tfrecord(data, text);
  const FramingOptions options{true, {}, 1000};
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    // A copy of its own, so that the address sanitizer sees a read behind the cut.
    const Bytes piece(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(cut));
    const Frames first = monolith::split_frames(piece, 0, options, false);
    CHECK(first.consumed <= cut);
    CHECK(first.consumed == cut || first.needed > cut - first.consumed);
    const Frames rest = monolith::split_frames(data, first.consumed, options, true);
    REQUIRE(first.frames.size() + rest.frames.size() == 3);
    CHECK_EQ(rest.consumed, data.size());
    std::vector<std::string> texts;
    for (const auto& frame : first.frames) texts.push_back(payload(piece, frame));
    for (const auto& frame : rest.frames) texts.push_back(payload(data, frame));
    CHECK(texts == (std::vector<std::string>{"one", "", "three three"}));
    // The same bytes without the rest: whole records, then a truncated one.
    const Frames truncated = monolith::split_frames(piece, 0, options, true);
    const bool clean = first.consumed == cut;
    CHECK_EQ(truncated.frames.size(), first.frames.size() + (clean ? 0u : 1u));
    CHECK(clean || truncated.frames.back().damage == Damage::kTruncated);
  }
}

TEST("TFRecord: every flipped bit is found, and costs one record or the rest") {
  Bytes data;
  put_tfrecord(data, "first");
  const std::size_t second = data.size();
  put_tfrecord(data, "second");
  for (std::size_t bit = 0; bit < 8 * second; ++bit) {
    Bytes damaged = data;
    damaged[bit / 8] = static_cast<std::uint8_t>(damaged[bit / 8] ^ (1u << (bit % 8)));
    const Frames found = monolith::split_frames(damaged, 0, {true, {}, 1000}, true);
    if (bit < 8 * 12) {
      REQUIRE(found.lost && found.frames.size() == 1 && found.frames[0].damage == Damage::kLengthChecksum);
    } else {
      REQUIRE(!found.lost && found.frames.size() == 2);
      CHECK(found.frames[0].damage == Damage::kPayloadChecksum && found.frames[1].damage == Damage::kNone);
    }
  }
}

TEST("TFRecord: a length with a right checksum is still bounded") {
  for (const std::uint64_t length : {std::uint64_t{1001}, std::uint64_t{1} << 40, UINT64_MAX, UINT64_MAX - 11}) {
    Bytes data;
    put(data, length);
    put(data, monolith::masked_crc32c(data.data(), 8));
    const Frames found = monolith::split_frames(data, 0, {true, {}, 1000}, false);
    REQUIRE(found.frames.size() == 1);
    CHECK(found.lost && found.frames[0].damage == Damage::kTooLong);
  }
}

TEST("masked checksum as TFRecord defines it") {
  // ((crc >> 15 | crc << 17) + 0xa282ead8) of crc32c("123456789") = 0xe3069283.
  CHECK_EQ(monolith::masked_crc32c("123456789", 9), ((0xe3069283u >> 15) | (0xe3069283u << 17)) + 0xa282ead8u);
}

TEST("records: every combination of headers") {
  for (int flags = 0; flags < 8; ++flags) {
    const monolith::RecordHeader header{false, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
    for (const bool sized_prefix : {false, true}) {
      Bytes data;
      for (const char* text : {"a", "bcd"}) {
        const bool sized = sized_prefix && header.kafka_dump_prefix && header.sort_id;
        if (header.kafka_dump_prefix) {
          put<std::uint64_t>(data, sized ? 2 : 0);
          if (!sized) put<std::uint64_t>(data, 77);
        }
        if (header.sort_id) {
          if (!sized) put<std::uint64_t>(data, 2);
          data.insert(data.end(), {'i', 'd'});
        }
        if (header.kafka_dump) put<std::uint64_t>(data, 99);
        put<std::uint64_t>(data, std::strlen(text));
        data.insert(data.end(), text, text + std::strlen(text));
      }
      const Frames found = monolith::split_frames(data, 0, records(header), true);
      REQUIRE(found.frames.size() == 2 && !found.lost);
      CHECK_EQ(payload(data, found.frames[0]), "a");
      CHECK_EQ(payload(data, found.frames[1]), "bcd");
    }
  }
}

TEST("records: a lagrangex header has type and key") {
  Bytes data;
  for (const std::uint64_t word : {std::uint64_t{0xffffffffaabbcc00}, std::uint64_t{0x11223301}}) {
    put(data, word);
    put<std::uint64_t>(data, 0);
  }
  const Frames found = monolith::split_frames(data, 0, records({true, false, false, false}), true);
  REQUIRE(found.frames.size() == 2);
  CHECK(found.frames[0].is_instance && !found.frames[1].is_instance);
  CHECK_EQ(found.frames[0].key, 0xaabbcc00u);
  CHECK_EQ(found.frames[1].key, 0x11223300u);
}

TEST("records: lengths that cannot be") {
  for (const std::uint64_t length : {std::uint64_t{0xfefefefe}, std::uint64_t{1001}, UINT64_MAX, UINT64_MAX - 7}) {
    Bytes plain;
    put(plain, length);
    Bytes sorted;
    put(sorted, length);
    put<std::uint64_t>(sorted, 0);
    const Damage expected = length == 0xfefefefe ? Damage::kForbiddenLength : Damage::kTooLong;
    for (const Frames& found : {monolith::split_frames(plain, 0, records(), true),
                                monolith::split_frames(sorted, 0, records({false, false, true, false}), true)}) {
      REQUIRE(found.frames.size() == 1 && found.lost);
      CHECK(found.frames[0].damage == expected);
    }
  }
}

TEST("random bytes never lead out of the data") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 20000; ++round) {
    Bytes data(random() % 64);
    // Small numbers are likely, so that lengths often fit.
    for (auto& byte : data) byte = static_cast<std::uint8_t>(random() % 3 == 0 ? random() % 8 : 0);
    const auto flags = random();
    monolith::RecordHeader header{(flags & 8) != 0, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
    if (header.lagrangex) header = {true, false, false, false};
    const Frames found = monolith::split_frames(data, 0, {(flags & 16) != 0, header, 1000}, (flags & 32) != 0);
    std::size_t at = 0;
    for (const auto& frame : found.frames) {
      REQUIRE(frame.start == at && frame.begin >= frame.start && frame.end >= frame.begin && frame.end <= data.size());
      at = &frame == &found.frames.back() ? found.consumed : (&frame)[1].start;
    }
    REQUIRE(found.consumed <= data.size());
  }
}
