// Records from anywhere: whatever is in them, all columns have the same rows, and no row is half there.
#include <algorithm>
#include <string>

#include "fuzz.h"
#include "monolith/record_parser.h"

namespace {

using namespace monolith;

std::vector<ColumnSpec> columns(bool reserved) {
  std::vector<ColumnSpec> specs{{"ids", "ids", ColumnType::kInt64, ColumnLayout::kRagged, 1, {}},
                                {"pair", "pair", ColumnType::kFloat32, ColumnLayout::kFixed, 2, 0.5},
                                {"name", "name", ColumnType::kBytes, ColumnLayout::kFixed, 1, {}},
                                {"tags", "tags", ColumnType::kBytes, ColumnLayout::kNested, 1, {}},
                                {"lists", "lists", ColumnType::kInt64, ColumnLayout::kNested, 1, {}},
                                {"price", "price", ColumnType::kFloat64, ColumnLayout::kRagged, 1, {}},
                                {"slot_3", "slot_3", ColumnType::kInt64, ColumnLayout::kRagged, 1, {}}};
  if (reserved) {
    specs.push_back({"label", "label", ColumnType::kFloat32, ColumnLayout::kFixed, 2, 0.0});
    specs.push_back({"weight", "instance_weight", ColumnType::kFloat32, ColumnLayout::kFixed, 1, 1.0});
    specs.push_back({"uid", "line_id.uid", ColumnType::kInt64, ColumnLayout::kFixed, 1, 0.0});
    specs.push_back({"actions", "line_id.actions", ColumnType::kInt64, ColumnLayout::kRagged, 1, {}});
  }
  return specs;
}

void check_splits(const std::vector<std::int64_t>& splits, std::size_t rows, std::size_t values) {
  FUZZ_REQUIRE(splits.size() == rows + 1 && splits.front() == 0 && splits.back() == static_cast<std::int64_t>(values));
  FUZZ_REQUIRE(std::ranges::is_sorted(splits));
}

void check(const ColumnSpec& spec, const ColumnData& data, std::size_t rows) {
  const std::size_t values = data.int64.size() + data.float32.size() + data.float64.size() + data.bytes.size();
  if (spec.layout == ColumnLayout::kFixed && spec.type != ColumnType::kBytes) {
    FUZZ_REQUIRE(values == rows * spec.width);
    return;
  }
  check_splits(data.splits, rows, values);
  if (spec.layout != ColumnLayout::kNested) return;
  check_splits(data.list_splits, rows, data.lengths.size());
  std::int64_t sum = 0;
  for (const std::int64_t length : data.lengths) {
    FUZZ_REQUIRE(length >= 0);
    sum += length;
  }
  FUZZ_REQUIRE(sum == static_cast<std::int64_t>(values));
}

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
  const auto specs = columns((flags & 8) != 0 && format != RecordFormat::kTfExample);
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
    for (std::size_t i = 0; i < specs.size(); ++i) check(specs[i], taken[i], rows);
  }
  return 0;
}
