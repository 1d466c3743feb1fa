// The columns that fuzz targets of parsers ask for, and what must be true of them whatever was parsed.
#pragma once

#include <algorithm>
#include <string>

#include "fuzz.h"
#include "monolith/record_parser.h"

namespace fuzz {

using monolith::ColumnData;
using monolith::ColumnLayout;
using monolith::ColumnSpec;
using monolith::ColumnType;

inline std::vector<ColumnSpec> columns(bool reserved) {
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

inline void check_splits(const std::vector<std::int64_t>& splits, std::size_t rows, std::size_t values) {
  FUZZ_REQUIRE(splits.size() == rows + 1 && splits.front() == 0 && splits.back() == static_cast<std::int64_t>(values));
  FUZZ_REQUIRE(std::ranges::is_sorted(splits));
}

inline void check_column(const ColumnSpec& spec, const ColumnData& data, std::size_t rows) {
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

}  // namespace fuzz
