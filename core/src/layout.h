// Where everything lies inside a row: the weights of all segments first, so that a lookup touches the fewest cache lines,
// then the optimizer state of each segment, aligned to 4 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "monolith/config.h"

namespace monolith {

// One named piece of a segment's optimizer state.
struct Slot {
  std::string name;
  std::uint32_t offset;  // bytes from the start of the row
  std::uint32_t width;   // elements
  bool is_int64;         // else float
};

struct SegmentLayout {
  Segment config;
  std::uint32_t value_offset;   // floats from the start of the decoded value
  std::uint32_t weight_offset;  // bytes from the start of the row
  std::uint32_t weight_bytes;
  std::uint32_t state_offset;
  std::uint32_t state_bytes;
  std::vector<Slot> slots;
};

struct RowLayout {
  explicit RowLayout(const TableConfig& config);  // throws InvalidArgument

  Mode mode;
  std::vector<SegmentLayout> segments;
  std::uint32_t dim = 0;           // decoded floats of a row
  std::uint32_t weight_bytes = 0;  // what a lookup reads
  std::uint32_t row_bytes = 0;     // multiple of 4
  bool has_gaps = false;           // some bytes belong to no weight and no state: they are zero

  // One line of text that is equal for two tables iff their rows are interchangeable byte for byte.
  std::string describe() const;
};

}  // namespace monolith
