// The fields of the original's messages that are not features, by the names columns ask for them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "column_builder.h"
#include "monolith/record_parser.h"

namespace monolith {

enum class Source : std::uint8_t { kFeature, kLabel, kWeight, kDataSourceKey, kLineId };

// Where the values of a column come from.
struct Origin {
  Source source = Source::kFeature;
  // Of kLineId: the field, how it is written, and whether only its last occurrence counts.
  std::uint32_t field = 0;
  Encoding encoding = Encoding::kVarint;
  bool single = true;
  // Of a feature of an Instance: the slot whose flat ids it also names.
  std::optional<std::uint32_t> slot;
};

// Throws InvalidArgument for an unknown LineId field.
Origin origin_of(std::string_view field, RecordFormat format);

// Field numbers of Example and Instance; an ExampleBatch has only the key.
struct FieldNumbers {
  std::uint32_t feature;
  std::uint32_t line_id;
  std::uint32_t label;
  std::uint32_t weight;
  std::uint32_t data_source_key;
  std::uint32_t flat_fids;  // 0: none
};
constexpr FieldNumbers kExampleFields{1, 100, 101, 102, 103, 0};
constexpr FieldNumbers kInstanceFields{9, 5, 3, 4, 100, 1};

// Appends field `origin.field` of a serialized LineId.
void append_line_id_field(ColumnBuilder& column, wire::Bytes line_id, const Origin& origin);

}  // namespace monolith
