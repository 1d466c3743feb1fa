// Records from anywhere: whatever is in them, all columns have the same rows, and no row is half there.
#include <algorithm>
#include <string>

#include "parsed_columns.h"

namespace {

using namespace monolith;

// Each record has its length in two bytes before it; one that lies has the rest.
std::vector<Frame> frames_of(const Bytes& bytes, bool instances) {
  std::vector<Frame> frames;
  for (std::size_t at = 0; bytes.size() - at >= 2;) {
    const std::size_t begin = at + 2;
    const std::size_t end = begin + std::min<std::size_t>(fuzz::read_at<std::uint16_t>(bytes, at), bytes.size() - begin);
    frames.push_back({at, begin, end, 7, instances && frames.size() % 2 == 0, Damage::kNone});
    at = end;
  }
  return frames;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const auto max_rows = input.take<std::uint8_t>();
  const auto format = static_cast<RecordFormat>(flags & 3);
  const bool by_header = (flags & 4) != 0 && (format == RecordFormat::kExample || format == RecordFormat::kInstance);
  const auto specs = fuzz::columns((flags & 8) != 0 && format != RecordFormat::kTfExample);
  const Bytes bytes = input.rest();
  const std::vector<Frame> frames = frames_of(bytes, by_header);
  RecordParser parser(format, by_header, specs);
  std::size_t frame = 0;
  std::size_t row = 0;
  while (frame < frames.size()) {
    const auto progress = parser.add(bytes, frames, frame, row, max_rows + std::size_t{1});
    FUZZ_REQUIRE(progress.frame > frame || progress.row > row);
    FUZZ_REQUIRE((progress.problem == Problem::kNone) == progress.message.empty());
    frame = progress.frame;
    row = progress.row;
    const std::size_t rows = parser.rows();
    const std::vector<ColumnData> taken = parser.take();
    FUZZ_REQUIRE(taken.size() == specs.size() && rows <= max_rows + std::size_t{1});
    for (std::size_t i = 0; i < specs.size(); ++i) fuzz::check_column(specs[i], taken[i], rows);
  }
  return 0;
}
