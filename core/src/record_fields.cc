#include "record_fields.h"

#include <array>
#include <charconv>
#include <string>

#include "monolith/error.h"

namespace monolith {
namespace {

struct LineIdField {
  std::string_view name;
  std::uint32_t number;
  Encoding encoding;
  bool single = true;
};
constexpr std::array<LineIdField, 14> kLineId{{
    {"uid", 2, Encoding::kFixed64},
    {"req_time", 3, Encoding::kVarint},
    {"item_id", 4, Encoding::kFixed64},
    {"actions", 6, Encoding::kVarint, false},
    {"chnid", 19, Encoding::kVarint},
    {"pre_actions", 23, Encoding::kVarint, false},
    {"sample_rate", 27, Encoding::kFloat},
    {"special_strategies", 39, Encoding::kVarint, false},
    {"device_type", 41, Encoding::kString},
    {"cid", 48, Encoding::kString},
    {"user_id", 49, Encoding::kString},
    {"is_draw", 87, Encoding::kVarint},
    {"rank", 145, Encoding::kVarint},
    {"data_source_name", 235, Encoding::kString},
}};

constexpr std::uint32_t kSlotsV1 = 1024;

std::optional<std::uint32_t> slot_of(std::string_view field) {
  if (field.starts_with("fc_")) field.remove_prefix(3);
  if (!field.starts_with("slot_")) return {};
  field.remove_prefix(5);
  std::uint32_t slot = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), slot);
  const bool whole = error == std::errc{} && end == field.data() + field.size();
  return whole && slot < kSlotsV1 ? std::optional(slot) : std::nullopt;
}

Origin line_id_origin(std::string_view field) {
  for (const LineIdField& known : kLineId) {
    if (known.name == field) return {Source::kLineId, known.number, known.encoding, known.single, {}};
  }
  std::string names;
  for (const LineIdField& known : kLineId) names += (names.empty() ? "" : ", ") + std::string(known.name);
  throw InvalidArgument("line_id." + std::string(field) + ": a LineId has no such field; it has " + names);
}

}  // namespace

Origin origin_of(std::string_view field, RecordFormat format) {
  if (format == RecordFormat::kTfExample || format == RecordFormat::kJson) return {};
  if (field == "label") return {Source::kLabel, 0, Encoding::kFloat, false, {}};
  if (field == "instance_weight") return {Source::kWeight, 0, Encoding::kFloat, true, {}};
  if (field == "data_source_key") return {Source::kDataSourceKey, 0, Encoding::kVarint, true, {}};
  if (field.starts_with("line_id.")) return line_id_origin(field.substr(8));
  Origin feature;
  feature.slot = slot_of(field);
  return feature;
}

void append_line_id_field(ColumnBuilder& column, wire::Bytes line_id, const Origin& origin) {
  for (wire::Reader reader(line_id); !reader.done();) {
    const auto [field, type] = reader.tag();
    if (field != origin.field) {
      reader.skip(type);
      continue;
    }
    if (origin.single) column.clear_row();
    column.append(reader, type, origin.encoding);
  }
}

}  // namespace monolith
