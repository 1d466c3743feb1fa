#include "monolith/record_parser.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "column_builder.h"
#include "feature_decoder.h"
#include "field_names.h"
#include "monolith/error.h"
#include "record_fields.h"
#include "wire.h"

namespace monolith {
namespace {

std::string_view text(wire::Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

const char* explain(Damage damage) {
  switch (damage) {
    case Damage::kPayloadChecksum: return "the checksum of the record is wrong";
    case Damage::kLengthChecksum: return "the checksum of the record's length is wrong; the rest of the file is lost";
    case Damage::kTooLong: return "the record is longer than max_record_bytes; the rest of the file is lost";
    case Damage::kForbiddenLength: return "the record's length is 0xfefefefe, the mark of an unfinished file";
    default: return "the file ends in the middle of a record";
  }
}

// A key and a value, as in map entries and NamedFeature (fields 1 and 2).
struct Named {
  std::string_view name;
  wire::Bytes value;
};

Named read_named(wire::Bytes message) {
  Named named;
  for (wire::Reader reader(message); !reader.done();) {
    const auto [field, type] = reader.tag();
    if (field == 1) {
      named.name = text(wire::submessage(reader, type));
    } else if (field == 2) {
      named.value = wire::submessage(reader, type);
    } else {
      reader.skip(type);
    }
  }
  return named;
}

std::string_view read_name(wire::Bytes message) {
  std::string_view name;
  for (wire::Reader reader(message); !reader.done();) {
    const auto [field, type] = reader.tag();
    if (field == 1) {
      name = text(wire::submessage(reader, type));
    } else {
      reader.skip(type);
    }
  }
  return name;
}

// A column of an ExampleBatch.
struct FeatureList {
  std::vector<wire::Bytes> features;
  bool shared = false;
};

FeatureList read_feature_list(wire::Bytes message) {
  FeatureList list;
  for (wire::Reader reader(message); !reader.done();) {
    const auto [field, type] = reader.tag();
    if (field == 2) {
      list.features.push_back(wire::submessage(reader, type));
    } else if (field == 3 && type == wire::kVarint) {
      list.shared = reader.varint() == 1;
    } else {
      reader.skip(type);
    }
  }
  return list;
}

// The bytes of the only string of a `__LINE_ID__` feature.
wire::Bytes read_line_id(wire::Bytes feature) {
  for (wire::Reader reader(feature); !reader.done();) {
    const auto [field, type] = reader.tag();
    if (field != 6) {
      reader.skip(type);
      continue;
    }
    wire::Reader list(wire::submessage(reader, type));
    if (list.done()) return {};
    const auto [inner_field, inner_type] = list.tag();
    if (inner_field == 1) return wire::submessage(list, inner_type);
    throw wire::Malformed{};
  }
  return {};
}

ColumnBuilder::Rule rule_of(Source source) {
  if (source == Source::kLabel) return ColumnBuilder::Rule::kPadWithFill;
  return source == Source::kWeight ? ColumnBuilder::Rule::kPositiveOrOne : ColumnBuilder::Rule::kExact;
}

}  // namespace

struct RecordParser::Impl {
  struct Column {
    ColumnBuilder builder;
    Origin origin;
    std::size_t name;  // in `names`
  };

  Impl(RecordFormat record_format, bool header_says, std::vector<ColumnSpec> specs)
      : format(record_format), by_header(header_says) {
    slot_columns.fill(FieldNames::kNone);
    for (ColumnSpec& spec : specs) add_column(std::move(spec));
    found.resize(names.size());
  }

  void add_column(ColumnSpec spec) {
    const std::string where = "column '" + spec.name + "': ";
    if (spec.layout == ColumnLayout::kFixed && spec.width == 0) throw InvalidArgument(where + "a width of 0");
    if (spec.type == ColumnType::kBytes && spec.layout == ColumnLayout::kRagged) {
      throw InvalidArgument(where + "bytes are fixed (one string per row) or nested");
    }
    const Origin origin = origin_of(spec.field, format);
    const std::size_t name = names.add(name_in_message(spec.field, origin.source));
    Column column{ColumnBuilder(std::move(spec), rule_of(origin.source)), origin, name};
    if (origin.source != Source::kFeature && !column.builder.accepts(origin.encoding)) {
      throw InvalidArgument(where + "another type than the field '" + column.builder.spec().field + "' has");
    }
    const ColumnSpec& kept = column.builder.spec();
    const bool nested_numbers = kept.layout == ColumnLayout::kNested && kept.type != ColumnType::kBytes;
    if (origin.source != Source::kFeature && nested_numbers) {
      throw InvalidArgument(where + "the field '" + kept.field + "' has no lists of lists");
    }
    if (origin.slot && kept.type == ColumnType::kInt64 && !nested_numbers) {
      if (slot_columns[*origin.slot] != FieldNames::kNone) {
        throw InvalidArgument(where + "another column has the ids of slot " + std::to_string(*origin.slot) + " already");
      }
      slot_columns[*origin.slot] = columns.size();
    }
    columns.push_back(std::move(column));
  }

  std::string name_in_message(const std::string& field, Source source) const {
    if (format != RecordFormat::kExampleBatch || source == Source::kFeature) return field;
    if (source == Source::kLineId) return "__LINE_ID__";
    return source == Source::kLabel ? "__LABEL__" : field;
  }

  std::size_t rows() const { return columns.empty() ? 0 : columns.front().builder.rows(); }

  void truncate(std::size_t count) {
    for (Column& column : columns) column.builder.truncate(count);
  }

  // Notes the bytes of the feature `name`, unless nobody asked for it. Names of a map may repeat, the last one counts.
  void note(std::string_view name, wire::Bytes value, bool repeats_allowed) {
    const std::size_t number = names.find(name);
    if (number == FieldNames::kNone) return;
    if (found[number].data() != nullptr && !repeats_allowed) {
      throw Mismatch{"feature '" + std::string(name) + "' is there twice"};
    }
    // An empty message has no bytes to point to, but it is there.
    static constexpr std::uint8_t kEmpty = 0;
    found[number] = value.data() == nullptr ? wire::Bytes(&kEmpty, 0) : value;
  }

  void begin_record() {
    std::fill(found.begin(), found.end(), wire::Bytes{});
    names.begin_record();
  }

  void read_tf_example(wire::Bytes message) {
    for (wire::Reader reader(message); !reader.done();) {
      const auto [field, type] = reader.tag();
      if (field != 1) {
        reader.skip(type);
        continue;
      }
      for (wire::Reader features(wire::submessage(reader, type)); !features.done();) {
        const auto [inner_field, inner_type] = features.tag();
        if (inner_field != 1) {
          features.skip(inner_type);
          continue;
        }
        const Named named = read_named(wire::submessage(features, inner_type));
        note(named.name, named.value, true);
      }
    }
  }

  // The ids of a slot are wherever they were written; columns are told by slot.
  void read_flat_fids(wire::Reader& reader, wire::Type type) {
    const auto append = [this](std::uint64_t fid) {
      const std::size_t column = slot_columns[fid >> 54];
      if (column == FieldNames::kNone) return;
      columns[column].builder.append(static_cast<std::int64_t>((fid >> 54) << 48 | (fid & ((std::uint64_t{1} << 48) - 1))));
    };
    if (type == wire::kFixed64) return append(reader.fixed<std::uint64_t>());
    for (wire::Reader fids(wire::submessage(reader, type)); !fids.done();) append(fids.fixed<std::uint64_t>());
  }

  void append_own_field(Source source, wire::Reader& reader, wire::Type type) {
    const wire::Reader before = reader;
    reader.skip(type);
    for (Column& column : columns) {
      if (column.origin.source != source) continue;
      wire::Reader again = before;
      if (column.origin.single) column.builder.clear_row();
      column.builder.append(again, type, column.origin.encoding);
    }
  }

  wire::Bytes read_row(wire::Bytes message, const FieldNumbers& numbers) {
    wire::Bytes line_id;
    for (wire::Reader reader(message); !reader.done();) {
      const auto [field, type] = reader.tag();
      if (field == numbers.feature) {
        const wire::Bytes feature = wire::submessage(reader, type);
        if (numbers.flat_fids != 0) {
          note(read_name(feature), feature, false);
        } else {
          const Named named = read_named(feature);
          note(named.name, named.value, false);
        }
      } else if (field == numbers.line_id) {
        line_id = wire::submessage(reader, type);
      } else if (field == numbers.label) {
        append_own_field(Source::kLabel, reader, type);
      } else if (field == numbers.weight) {
        append_own_field(Source::kWeight, reader, type);
      } else if (field == numbers.data_source_key) {
        append_own_field(Source::kDataSourceKey, reader, type);
      } else if (field == numbers.flat_fids) {
        read_flat_fids(reader, type);
      } else {
        reader.skip(type);
      }
    }
    return line_id;
  }

  void parse_row(wire::Bytes message, RecordFormat row_format, const Frame& frame) {
    begin_record();
    for (Column& column : columns) column.builder.begin_row();
    wire::Bytes line_id;
    if (row_format == RecordFormat::kTfExample) {
      read_tf_example(message);
    } else {
      line_id = read_row(message, row_format == RecordFormat::kInstance ? kInstanceFields : kExampleFields);
    }
    for (Column& column : columns) {
      finish_row(column, row_format, line_id);
      if (by_header && column.origin.source == Source::kDataSourceKey) {
        column.builder.clear_row();
        column.builder.append(frame.key);
      }
      column.builder.end_row();
    }
  }

  void finish_row(Column& column, RecordFormat row_format, wire::Bytes line_id) {
    if (column.origin.source == Source::kLineId) {
      append_line_id_field(column.builder, line_id, column.origin);
    } else if (column.origin.source == Source::kFeature && found[column.name].data() != nullptr) {
      column.builder.clear_row();
      append_feature(column.builder, found[column.name], row_format);
    }
  }

  // The rows [first, first + at_most) of an ExampleBatch; returns how many it has. From its first row on a batch is read as a
  // whole, so that damage anywhere in it is found before any of its rows has been handed out.
  std::size_t parse_batch(wire::Bytes message, std::size_t first, std::size_t at_most) {
    begin_record();
    std::int64_t batch_size = 0;
    std::int64_t key = 0;
    for (wire::Reader reader(message); !reader.done();) {
      const auto [field, type] = reader.tag();
      if (field == 1) {
        const wire::Bytes list = wire::submessage(reader, type);
        note(read_name(list), list, false);
      } else if (field == 3 && type == wire::kVarint) {
        batch_size = static_cast<std::int64_t>(reader.varint());
      } else if (field == 100 && type == wire::kVarint) {
        key = static_cast<std::int64_t>(reader.varint());
      } else {
        reader.skip(type);
      }
    }
    if (batch_size < 0 || batch_size > static_cast<std::int64_t>(kMaxRows)) throw wire::Malformed{};
    const auto total = static_cast<std::size_t>(batch_size);
    const std::size_t before = rows();
    const std::size_t read = first == 0 ? total : std::min(total - std::min(first, total), at_most);
    if (read == 0) return total;
    for (Column& column : columns) append_rows(column, first, read, total, key);
    truncate(before + std::min(read, at_most));
    return total;
  }

  void append_rows(Column& column, std::size_t first, std::size_t count, std::size_t total, std::int64_t key) {
    ColumnBuilder& builder = column.builder;
    const std::size_t goal = builder.rows() + count;
    const wire::Bytes bytes = found[column.name];
    const FeatureList list = bytes.data() == nullptr ? FeatureList{{}, true} : read_feature_list(bytes);
    if (!list.shared && list.features.size() != total) {
      throw Mismatch{"feature '" + builder.spec().field + "' has " + std::to_string(list.features.size()) +
                     " rows, the batch has " + std::to_string(total)};
    }
    if (!list.shared) {
      for (std::size_t row = first; row < first + count; ++row) append_batch_row(column, list.features[row]);
      return;
    }
    append_batch_row(column, list.features.empty() ? wire::Bytes{} : list.features.front(), key);
    if (builder.last_row_size() * total > kMaxSpread) {
      throw Mismatch{"feature '" + builder.spec().field + "' is shared by " + std::to_string(total) +
                     " rows and too long to be copied for each"};
    }
    builder.repeat_last_row(goal);
  }

  void append_batch_row(Column& column, wire::Bytes feature, std::int64_t key = 0) {
    column.builder.begin_row();
    switch (column.origin.source) {
      case Source::kDataSourceKey: column.builder.append(key); break;
      case Source::kLineId: append_line_id_field(column.builder, read_line_id(feature), column.origin); break;
      default: append_feature(column.builder, feature, format);
    }
    column.builder.end_row();
  }

  RecordFormat format;
  bool by_header;
  std::vector<Column> columns;
  FieldNames names;
  std::vector<wire::Bytes> found;  // by name; no data: not in this record
  std::array<std::size_t, 1024> slot_columns;
};

RecordParser::RecordParser(RecordFormat format, bool by_header, std::vector<ColumnSpec> columns)
    : impl_(std::make_unique<Impl>(format, by_header, std::move(columns))) {}

RecordParser::~RecordParser() = default;

std::size_t RecordParser::rows() const noexcept { return impl_->rows(); }

RecordParser::Progress RecordParser::add(std::span<const std::uint8_t> data, std::span<const Frame> frames, std::size_t frame,
                                         std::size_t row, std::size_t max_rows, std::size_t stride) {
  Impl& impl = *impl_;
  for (; frame < frames.size() && impl.rows() < max_rows; frame += stride, row = 0) {
    const Frame& next = frames[frame];
    if (next.damage != Damage::kNone) return {frame + stride, 0, Problem::kCorrupt, explain(next.damage)};
    const wire::Bytes message = data.subspan(next.begin, next.end - next.begin);
    const std::size_t before = impl.rows();
    try {
      if (impl.format == RecordFormat::kExampleBatch) {
        const std::size_t total = impl.parse_batch(message, row, max_rows - before);
        row += impl.rows() - before;
        if (row < total) return {frame, row, Problem::kNone, ""};
      } else {
        const RecordFormat by_type = next.is_instance ? RecordFormat::kInstance : RecordFormat::kExample;
        impl.parse_row(message, impl.by_header ? by_type : impl.format, next);
      }
    } catch (const wire::Malformed&) {
      impl.truncate(before);
      return {frame + stride, 0, Problem::kCorrupt, "the record is not a valid message"};
    } catch (const Mismatch& mismatch) {
      impl.truncate(before);
      return {frame + stride, 0, Problem::kSchema, mismatch.message};
    }
  }
  return {frame, row, Problem::kNone, ""};
}

std::vector<ColumnData> RecordParser::take() {
  std::vector<ColumnData> data;
  data.reserve(impl_->columns.size());
  for (auto& column : impl_->columns) data.push_back(column.builder.take());
  return data;
}

}  // namespace monolith
