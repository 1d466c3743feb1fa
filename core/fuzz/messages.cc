// Messages of a queue, JSON above all: whatever is in them, all columns have the same rows, no row is half there, a message that is
// refused has a reason, and numbers of columns that must be finite are.
#include <cmath>
#include <string>

#include "parsed_columns.h"

namespace {

using namespace monolith;

// Each message has its length in two bytes before it; one that lies has the rest. Each gets memory of exactly its size.
std::vector<Bytes> messages_of(const Bytes& bytes) {
  std::vector<Bytes> messages;
  for (std::size_t at = 0; bytes.size() - at >= 2;) {
    const std::size_t begin = at + 2;
    const std::size_t end = begin + std::min<std::size_t>(fuzz::read_at<std::uint16_t>(bytes, at), bytes.size() - begin);
    messages.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(begin), bytes.begin() + static_cast<std::ptrdiff_t>(end));
    at = end;
  }
  return messages;
}

bool is_printable(const std::string& text) {
  return std::ranges::all_of(text, [](char letter) { return letter >= ' ' && letter <= '~'; });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input input(data, size);
  const auto flags = input.take<std::uint8_t>();
  const auto max_rows = input.take<std::uint8_t>();
  constexpr RecordFormat kOthers[] = {RecordFormat::kExample, RecordFormat::kExampleBatch, RecordFormat::kInstance};
  const RecordFormat format = (flags & 3) == 0 ? RecordFormat::kJson : kOthers[(flags & 3) - 1];
  MessageOptions options;
  options.max_bytes = 2000;
  if ((flags & 4) != 0) options.header = RecordHeader{(flags & 8) != 0, (flags & 16) != 0, (flags & 32) != 0, (flags & 64) != 0};
  const bool by_header = options.header && options.header->lagrangex && format != RecordFormat::kJson;
  auto specs = fuzz::columns(false);
  for (ColumnSpec& spec : specs) spec.finite = true;
  const std::vector<Bytes> messages = messages_of(input.rest());
  const std::vector<std::span<const std::uint8_t>> spans(messages.begin(), messages.end());
  RecordParser parser(format, by_header && format != RecordFormat::kExampleBatch, specs);
  std::size_t message = 0;
  std::size_t row = 0;
  while (message < spans.size()) {
    const auto progress = parser.add(spans, message, row, max_rows + std::size_t{1}, options);
    FUZZ_REQUIRE(progress.frame > message || progress.row > row);
    FUZZ_REQUIRE((progress.problem == Problem::kNone) == progress.message.empty());
    FUZZ_REQUIRE(progress.message.size() < 200 && is_printable(progress.message));
    message = progress.frame;
    row = progress.row;
    const std::size_t rows = parser.rows();
    const std::vector<ColumnData> taken = parser.take();
    FUZZ_REQUIRE(taken.size() == specs.size() && rows <= max_rows + std::size_t{1});
    for (std::size_t i = 0; i < specs.size(); ++i) fuzz::check_column(specs[i], taken[i], rows);
    for (const ColumnData& column : taken) {
      FUZZ_REQUIRE(std::ranges::all_of(column.float32, [](float value) { return std::isfinite(value); }));
      FUZZ_REQUIRE(std::ranges::all_of(column.float64, [](double value) { return std::isfinite(value); }));
    }
  }
  return 0;
}
