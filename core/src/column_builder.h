// Collects the rows of one column. A row is begun, gets values, and is ended; anything unfinished can be taken back.
#pragma once

#include <string>
#include <string_view>

#include "monolith/columns.h"
#include "wire.h"

namespace monolith {

// A well-formed record does not fit the column asked for.
struct Mismatch {
  std::string message;
};

// How a number or string is written in a message.
enum class Encoding : std::uint8_t { kVarint, kFixed64, kFidV1, kFloat, kDouble, kString };

class ColumnBuilder {
 public:
  // What a row that is not as long as the column wants may become.
  enum class Rule : std::uint8_t { kExact, kPadWithFill, kPositiveOrOne };

  ColumnBuilder(ColumnSpec spec, Rule rule) : spec_(std::move(spec)), rule_(rule) {}

  const ColumnSpec& spec() const noexcept { return spec_; }
  std::size_t rows() const noexcept { return rows_; }

  bool accepts(Encoding encoding) const noexcept;

  // Values of one occurrence of a field, packed or not. The column accepts the encoding.
  void append(wire::Reader& reader, wire::Type type, Encoding encoding);
  void append(std::int64_t value) { data_.int64.push_back(value); }
  // A finite number into a column of floats. False if it is too large for float32.
  bool append_real(double value);
  void append_string(std::string_view string);
  // Between two of these the values appended are one inner list.
  void begin_list() { list_begin_ = num_values(); }
  void end_list() { data_.lengths.push_back(static_cast<std::int64_t>(num_values() - list_begin_)); }

  void begin_row();
  void clear_row();
  // Throws Mismatch if the row is not as long as it must be.
  void end_row();
  // Adds copies of the last row until there are `rows`.
  void repeat_last_row(std::size_t rows);
  // Values (inner lists, strings) of the last row.
  std::size_t last_row_size() const noexcept;

  void truncate(std::size_t rows);
  ColumnData take();

 private:
  std::size_t num_values() const noexcept;
  bool is_fixed_number() const noexcept;
  void resize_values(std::size_t size);
  void fill(std::size_t count);
  void end_fixed_row();
  void require_finite() const;
  template <typename T>
  void repeat_values(std::vector<T>& values, std::size_t begin, std::size_t times);

  ColumnSpec spec_;
  Rule rule_;
  ColumnData data_;
  std::size_t rows_ = 0;
  std::size_t row_begin_ = 0;    // values before this row
  std::size_t lists_begin_ = 0;  // inner lists before this row
  std::size_t strings_ = 0;      // of this row
  std::size_t list_begin_ = 0;
};

}  // namespace monolith
