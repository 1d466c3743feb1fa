// What to take out of records and the shape it gets: one ColumnSpec per output column, one ColumnData with its rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace monolith {

enum class ColumnType : std::uint8_t { kInt64, kFloat32, kFloat64, kBytes };

enum class ColumnLayout : std::uint8_t {
  kFixed,   // `width` values in each row; bytes: one string in each row
  kRagged,  // any number of values in each row; not for bytes
  kNested,  // any number of lists of values in each row; bytes: any number of strings
};

struct ColumnSpec {
  std::string name;   // for messages
  std::string field;  // see record_parser.h
  ColumnType type = ColumnType::kInt64;
  ColumnLayout layout = ColumnLayout::kRagged;
  std::size_t width = 1;
  // What a missing value of a fixed column becomes; without it a record that lacks the column does not fit the schema.
  std::optional<double> fill;
  // A record with NaN or infinity in a column of floats does not fit the schema.
  bool finite = false;
};

// The rows of one column. Of the value vectors only that of the column's type is used; bytes of strings are concatenated.
struct ColumnData {
  std::vector<std::int64_t> int64;
  std::vector<float> float32;
  std::vector<double> float64;
  std::vector<std::uint8_t> bytes;
  // Rows + 1 entries, row i has values [splits[i], splits[i+1]). Unused for fixed columns of numbers.
  std::vector<std::int64_t> splits{0};
  // kNested only: the length of every inner list, and the inner lists of row i are [list_splits[i], list_splits[i+1]).
  std::vector<std::int64_t> lengths;
  std::vector<std::int64_t> list_splits{0};
};

}  // namespace monolith
