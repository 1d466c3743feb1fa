#include "column_builder.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace monolith {
namespace {

constexpr std::uint64_t kSignatureV2 = (std::uint64_t{1} << 48) - 1;

wire::Type wire_type(Encoding encoding) {
  switch (encoding) {
    case Encoding::kVarint: return wire::kVarint;
    case Encoding::kFloat: return wire::kFixed32;
    case Encoding::kString: return wire::kBytes;
    default: return wire::kFixed64;
  }
}

// Appends n fixed-size numbers that lie one after the other in `bytes`.
template <typename Stored, typename T>
void append_fixed(wire::Bytes bytes, std::vector<T>& values) {
  if (bytes.size() % sizeof(Stored) != 0) throw wire::Malformed{};
  const std::size_t old = values.size();
  values.resize(old + bytes.size() / sizeof(Stored));
  if constexpr (sizeof(Stored) == sizeof(T) && std::is_floating_point_v<Stored> == std::is_floating_point_v<T>) {
    if (!bytes.empty()) std::memcpy(values.data() + old, bytes.data(), bytes.size());
  } else {
    for (std::size_t i = old; i < values.size(); ++i) {
      Stored value;
      std::memcpy(&value, bytes.data() + (i - old) * sizeof value, sizeof value);
      values[i] = static_cast<T>(value);
    }
  }
}

template <typename Stored, typename T>
void append_fixed(wire::Reader& reader, bool packed, std::vector<T>& values) {
  if (packed) {
    append_fixed<Stored>(reader.bytes(), values);
  } else {
    values.push_back(static_cast<T>(reader.fixed<Stored>()));
  }
}

void append_varints(wire::Reader& reader, bool packed, std::vector<std::int64_t>& values) {
  if (!packed) {
    values.push_back(static_cast<std::int64_t>(reader.varint()));
    return;
  }
  for (wire::Reader numbers(reader.bytes()); !numbers.done();) {
    values.push_back(static_cast<std::int64_t>(numbers.varint()));
  }
}

std::int64_t fid_v1_to_v2(std::int64_t fid) {
  const auto bits = static_cast<std::uint64_t>(fid);
  return static_cast<std::int64_t>((bits >> 54) << 48 | (bits & kSignatureV2));
}

}  // namespace

bool ColumnBuilder::accepts(Encoding encoding) const noexcept {
  switch (spec_.type) {
    case ColumnType::kInt64: return encoding <= Encoding::kFidV1;
    case ColumnType::kBytes: return encoding == Encoding::kString;
    default: return encoding == Encoding::kFloat || encoding == Encoding::kDouble;
  }
}

void ColumnBuilder::append(wire::Reader& reader, wire::Type type, Encoding encoding) {
  if (encoding == Encoding::kString) {
    const wire::Bytes string = wire::submessage(reader, type);
    append_string(std::string_view(reinterpret_cast<const char*>(string.data()), string.size()));
    return;
  }
  const bool packed = type == wire::kBytes;
  if (!packed && type != wire_type(encoding)) throw wire::Malformed{};
  const bool narrow = spec_.type == ColumnType::kFloat32;
  switch (encoding) {
    case Encoding::kVarint: append_varints(reader, packed, data_.int64); break;
    case Encoding::kFixed64: append_fixed<std::int64_t>(reader, packed, data_.int64); break;
    case Encoding::kFidV1: {
      const std::size_t old = data_.int64.size();
      append_fixed<std::int64_t>(reader, packed, data_.int64);
      std::transform(data_.int64.begin() + old, data_.int64.end(), data_.int64.begin() + old, fid_v1_to_v2);
      break;
    }
    case Encoding::kFloat:
      narrow ? append_fixed<float>(reader, packed, data_.float32) : append_fixed<float>(reader, packed, data_.float64);
      break;
    default:
      narrow ? append_fixed<double>(reader, packed, data_.float32) : append_fixed<double>(reader, packed, data_.float64);
  }
}

bool ColumnBuilder::append_real(double value) {
  if (spec_.type == ColumnType::kFloat64) {
    data_.float64.push_back(value);
    return true;
  }
  // From here on numbers are nearer to 2^128 than to the largest float.
  constexpr double kFirstTooLarge = 0x1.ffffffp127;
  if (std::abs(value) >= kFirstTooLarge) return false;
  data_.float32.push_back(static_cast<float>(value));
  return true;
}

void ColumnBuilder::append_string(std::string_view string) {
  data_.bytes.insert(data_.bytes.end(), string.begin(), string.end());
  ++strings_;
  if (spec_.layout == ColumnLayout::kNested) data_.lengths.push_back(static_cast<std::int64_t>(string.size()));
}

std::size_t ColumnBuilder::num_values() const noexcept {
  return data_.int64.size() + data_.float32.size() + data_.float64.size() + data_.bytes.size();
}

bool ColumnBuilder::is_fixed_number() const noexcept {
  return spec_.layout == ColumnLayout::kFixed && spec_.type != ColumnType::kBytes;
}

void ColumnBuilder::resize_values(std::size_t size) {
  switch (spec_.type) {
    case ColumnType::kInt64: data_.int64.resize(size); break;
    case ColumnType::kFloat32: data_.float32.resize(size); break;
    case ColumnType::kFloat64: data_.float64.resize(size); break;
    case ColumnType::kBytes: data_.bytes.resize(size); break;
  }
}

void ColumnBuilder::begin_row() {
  row_begin_ = num_values();
  lists_begin_ = data_.lengths.size();
  strings_ = 0;
}

void ColumnBuilder::clear_row() {
  resize_values(row_begin_);
  data_.lengths.resize(lists_begin_);
  strings_ = 0;
}

void ColumnBuilder::fill(std::size_t count) {
  const double value = *spec_.fill;
  switch (spec_.type) {
    case ColumnType::kInt64: data_.int64.insert(data_.int64.end(), count, static_cast<std::int64_t>(value)); break;
    case ColumnType::kFloat32: data_.float32.insert(data_.float32.end(), count, static_cast<float>(value)); break;
    case ColumnType::kFloat64: data_.float64.insert(data_.float64.end(), count, value); break;
    case ColumnType::kBytes: break;
  }
}

void ColumnBuilder::end_fixed_row() {
  const std::size_t count = num_values() - row_begin_;
  const bool may_fill = spec_.fill && (count == 0 || (rule_ == Rule::kPadWithFill && count < spec_.width));
  if (may_fill) {
    fill(spec_.width - count);
  } else if (count == 0 && spec_.width > 0) {
    throw Mismatch{"field '" + spec_.field + "' is missing; a feature may have a default or be ragged, a label needs its value"};
  } else if (count != spec_.width) {
    throw Mismatch{"field '" + spec_.field + "' has " + std::to_string(count) + " values, expected " +
                   std::to_string(spec_.width)};
  }
  if (rule_ != Rule::kPositiveOrOne) return;
  const auto repair = [](auto& values, std::size_t begin) {
    for (std::size_t i = begin; i < values.size(); ++i) values[i] = values[i] <= 0 ? 1 : values[i];
  };
  repair(data_.float32, spec_.type == ColumnType::kFloat32 ? row_begin_ : data_.float32.size());
  repair(data_.float64, spec_.type == ColumnType::kFloat64 ? row_begin_ : data_.float64.size());
}

void ColumnBuilder::require_finite() const {
  const auto check = [this](const auto& values) {
    for (std::size_t i = row_begin_; i < values.size(); ++i) {
      if (!std::isfinite(values[i])) throw Mismatch{"field '" + spec_.field + "' has a value that is NaN or infinite"};
    }
  };
  if (spec_.type == ColumnType::kFloat32) check(data_.float32);
  if (spec_.type == ColumnType::kFloat64) check(data_.float64);
}

void ColumnBuilder::end_row() {
  if (spec_.finite) require_finite();
  if (is_fixed_number()) {
    end_fixed_row();
  } else {
    if (spec_.layout == ColumnLayout::kFixed && strings_ > 1) {
      throw Mismatch{"field '" + spec_.field + "' has " + std::to_string(strings_) + " strings, expected 1"};
    }
    data_.splits.push_back(static_cast<std::int64_t>(num_values()));
    if (spec_.layout == ColumnLayout::kNested) {
      data_.list_splits.push_back(static_cast<std::int64_t>(data_.lengths.size()));
    }
  }
  ++rows_;
}

std::size_t ColumnBuilder::last_row_size() const noexcept {
  return num_values() - row_begin_ + data_.lengths.size() - lists_begin_;
}

template <typename T>
void ColumnBuilder::repeat_values(std::vector<T>& values, std::size_t begin, std::size_t times) {
  const std::size_t count = values.size() - begin;
  values.reserve(values.size() + count * times);
  for (std::size_t i = 0; i < count * times; ++i) values.push_back(values[begin + i % count]);
}

void ColumnBuilder::repeat_last_row(std::size_t rows) {
  if (rows <= rows_) return;
  const std::size_t times = rows - rows_;
  const std::size_t values = num_values() - row_begin_;
  const std::size_t lists = data_.lengths.size() - lists_begin_;
  switch (spec_.type) {
    case ColumnType::kInt64: repeat_values(data_.int64, row_begin_, times); break;
    case ColumnType::kFloat32: repeat_values(data_.float32, row_begin_, times); break;
    case ColumnType::kFloat64: repeat_values(data_.float64, row_begin_, times); break;
    case ColumnType::kBytes: repeat_values(data_.bytes, row_begin_, times); break;
  }
  repeat_values(data_.lengths, lists_begin_, times);
  for (std::size_t i = 0; i < times && !is_fixed_number(); ++i) {
    data_.splits.push_back(data_.splits.back() + static_cast<std::int64_t>(values));
    if (spec_.layout == ColumnLayout::kNested) {
      data_.list_splits.push_back(data_.list_splits.back() + static_cast<std::int64_t>(lists));
    }
  }
  rows_ = rows;
}

void ColumnBuilder::truncate(std::size_t rows) {
  if (is_fixed_number()) {
    resize_values(rows * spec_.width);
  } else {
    data_.splits.resize(rows + 1);
    resize_values(static_cast<std::size_t>(data_.splits.back()));
    if (spec_.layout == ColumnLayout::kNested) {
      data_.list_splits.resize(rows + 1);
      data_.lengths.resize(static_cast<std::size_t>(data_.list_splits.back()));
    }
  }
  rows_ = rows;
}

ColumnData ColumnBuilder::take() {
  // The next batch is mostly as large as this one.
  static constexpr std::size_t kMostReserved = std::size_t{1} << 16;
  ColumnData next;
  const auto reserve = [](auto& fresh, const auto& full) { fresh.reserve(std::min(full.size(), kMostReserved)); };
  reserve(next.int64, data_.int64);
  reserve(next.float32, data_.float32);
  reserve(next.float64, data_.float64);
  reserve(next.splits, data_.splits);
  rows_ = 0;
  return std::exchange(data_, std::move(next));
}

}  // namespace monolith
