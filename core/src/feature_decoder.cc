#include "feature_decoder.h"

#include <array>
#include <span>
#include <string>

namespace monolith {
namespace {

// Where the values are in a field of a feature message.
enum class Place : std::uint8_t {
  kNone,    // not a field with values
  kValue,   // the field is the value
  kValues,  // the field is repeated (perhaps packed)
  kList,    // a message with the values in its field 1
  kLists,   // a message with lists in its field 1
  kItems,   // the field is repeated, each occurrence is a list
};

struct Kind {
  Place place = Place::kNone;
  Encoding encoding = Encoding::kVarint;
  const char* name = "";
};

// By field number, from 0.
constexpr std::array<Kind, 4> kTfFeature{{
    {},
    {Place::kList, Encoding::kString, "bytes_list"},
    {Place::kList, Encoding::kFloat, "float_list"},
    {Place::kList, Encoding::kVarint, "int64_list"},
}};
constexpr std::array<Kind, 17> kFeature{{
    {},
    {Place::kList, Encoding::kFidV1, "fid_v1_list"},
    {Place::kList, Encoding::kFixed64, "fid_v2_list"},
    {Place::kList, Encoding::kFloat, "float_list"},
    {Place::kList, Encoding::kDouble, "double_list"},
    {Place::kList, Encoding::kVarint, "int64_list"},
    {Place::kList, Encoding::kString, "bytes_list"},
    {Place::kLists, Encoding::kFixed64, "fid_v2_lists"},
    {Place::kLists, Encoding::kFloat, "float_lists"},
    {Place::kLists, Encoding::kDouble, "double_lists"},
    {Place::kLists, Encoding::kVarint, "int64_lists"},
    {Place::kLists, Encoding::kString, "bytes_lists"},
    {Place::kValue, Encoding::kVarint, "int64_value"},
    {Place::kValue, Encoding::kFloat, "float_value"},
    {Place::kValue, Encoding::kDouble, "double_value"},
    {Place::kValue, Encoding::kString, "bytes_value"},
    {Place::kLists, Encoding::kFidV1, "fid_v1_lists"},
}};
constexpr std::array<Kind, 10> kInstanceFeature{{
    {},
    {},  // name
    {Place::kValues, Encoding::kFixed64, "fid"},
    {Place::kValues, Encoding::kFloat, "float_value"},
    {Place::kValues, Encoding::kVarint, "int64_value"},
    {Place::kValues, Encoding::kString, "bytes_value"},
    {Place::kItems, Encoding::kFixed64, "fid_list"},
    {Place::kItems, Encoding::kFloat, "float_list"},
    {Place::kItems, Encoding::kVarint, "int64_list"},
    {Place::kItems, Encoding::kString, "bytes_list"},
}};

std::span<const Kind> kinds_of(RecordFormat format) {
  switch (format) {
    case RecordFormat::kTfExample: return kTfFeature;
    case RecordFormat::kInstance: return kInstanceFeature;
    default: return kFeature;
  }
}

const char* name_of(ColumnType type) {
  constexpr std::array<const char*, 4> kNames{"int64", "float32", "float64", "bytes"};
  return kNames[static_cast<std::size_t>(type)];
}

[[noreturn]] void refuse(const ColumnSpec& spec, const Kind& kind, const std::string& why) {
  throw Mismatch{"field '" + spec.field + "' has a " + kind.name + ", " + why};
}

void check(const ColumnBuilder& column, const Kind& kind) {
  const ColumnSpec& spec = column.spec();
  if (!column.accepts(kind.encoding)) refuse(spec, kind, std::string("the column is ") + name_of(spec.type));
  const bool lists = kind.place == Place::kLists || kind.place == Place::kItems;
  const bool nested = spec.layout == ColumnLayout::kNested;
  if (spec.type == ColumnType::kBytes) {
    if (lists) refuse(spec, kind, "lists of lists of strings are not supported");
  } else if (lists != nested) {
    refuse(spec, kind, nested ? "the column is nested" : "the column is not nested");
  }
}

void append_list(ColumnBuilder& column, wire::Bytes list, Encoding encoding) {
  for (wire::Reader reader(list); !reader.done();) {
    const auto [field, type] = reader.tag();
    field == 1 ? column.append(reader, type, encoding) : reader.skip(type);
  }
}

void append_inner_list(ColumnBuilder& column, wire::Bytes list, Encoding encoding) {
  column.begin_list();
  append_list(column, list, encoding);
  column.end_list();
}

void append_lists(ColumnBuilder& column, wire::Bytes lists, Encoding encoding) {
  for (wire::Reader reader(lists); !reader.done();) {
    const auto [field, type] = reader.tag();
    field == 1 ? append_inner_list(column, wire::submessage(reader, type), encoding) : reader.skip(type);
  }
}

void append_field(ColumnBuilder& column, wire::Reader& reader, wire::Type type, const Kind& kind) {
  switch (kind.place) {
    case Place::kNone: reader.skip(type); break;
    case Place::kValue:
    case Place::kValues: column.append(reader, type, kind.encoding); break;
    case Place::kList: append_list(column, wire::submessage(reader, type), kind.encoding); break;
    case Place::kLists: append_lists(column, wire::submessage(reader, type), kind.encoding); break;
    case Place::kItems: append_inner_list(column, wire::submessage(reader, type), kind.encoding); break;
  }
}

}  // namespace

void append_feature(ColumnBuilder& column, wire::Bytes feature, RecordFormat format) {
  const std::span<const Kind> kinds = kinds_of(format);
  std::uint32_t current = 0;
  for (wire::Reader reader(feature); !reader.done();) {
    const auto [field, type] = reader.tag();
    if (field >= kinds.size() || kinds[field].place == Place::kNone) {
      reader.skip(type);
      continue;
    }
    const Kind& kind = kinds[field];
    check(column, kind);
    // All but the Instance's have a oneof: another member replaces what was there, the same one is merged into it.
    const bool oneof = format != RecordFormat::kInstance;
    if (oneof && (field != current || kind.place == Place::kValue)) column.clear_row();
    current = field;
    append_field(column, reader, type, kind);
  }
}

}  // namespace monolith
