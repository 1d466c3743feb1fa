#include "monolith/record_parser.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>
#include <utility>

#include "column_builder.h"
#include "feature_decoder.h"
#include "field_names.h"
#include "json_reader.h"
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

// The record of a message that has a header and a length before it.
Frame only_frame(wire::Bytes message, const MessageOptions& options) {
  const Frames found = split_frames(message, 0, {false, *options.header, options.max_bytes}, true);
  if (found.frames.size() != 1 || found.frames[0].damage != Damage::kNone || found.frames[0].end != message.size()) {
    throw Mismatch{"the message is not one record with its header and length before it"};
  }
  return found.frames[0];
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
    columns_of_name.resize(names.size());
    for (std::size_t i = 0; i < columns.size(); ++i) columns_of_name[columns[i].name].push_back(i);
    seen_in.resize(names.size(), 0);
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

  void read_json(wire::Bytes message) {
    JsonReader reader(message, scratch);
    ++json_records;
    reader.expect('{', message.empty() ? "the record is empty" : "expected an object");
    if (!reader.take('}')) {
      do {
        const std::size_t name = names.find(reader.key());
        if (name == FieldNames::kNone) {
          reader.skip();
        } else {
          append_json_field(name, reader);
        }
      } while (reader.take(','));
      reader.expect('}', "expected ',' or '}' in an object");
    }
    reader.end();
  }

  void append_json_field(std::size_t name, JsonReader& reader) {
    const std::vector<std::size_t>& asking = columns_of_name[name];
    if (std::exchange(seen_in[name], json_records) == json_records) {
      throw Mismatch{"field '" + columns[asking.front()].builder.spec().field + "' is there twice"};
    }
    const JsonReader::Mark value = reader.mark();
    for (const std::size_t column : asking) {
      reader.go_back(value);
      append_json(columns[column].builder, reader);
    }
  }

  // Appends the values of one field to the row that `column` has begun.
  static void append_json(ColumnBuilder& column, JsonReader& reader) {
    if (reader.take_null()) return;
    const ColumnSpec& spec = column.spec();
    if (spec.type == ColumnType::kBytes) {
      if (spec.layout == ColumnLayout::kFixed) return append_json_string(column, reader);
      require(reader.next() == '[', spec, "a list of strings", reader);
      return reader.list([&] { append_json_string(column, reader); });
    }
    if (spec.layout == ColumnLayout::kNested) {
      require(reader.next() == '[', spec, "a list of lists", reader);
      return reader.list([&] {
        require(reader.next() == '[', spec, "a list of lists", reader);
        column.begin_list();
        reader.list([&] { append_json_number(column, reader); });
        column.end_list();
      });
    }
    if (reader.next() != '[') return append_json_number(column, reader);
    reader.list([&] { append_json_number(column, reader); });
  }

  static void append_json_string(ColumnBuilder& column, JsonReader& reader) {
    require(reader.next() == '"', column.spec(), "a string", reader);
    column.append_string(reader.string());
  }

  static void append_json_number(ColumnBuilder& column, JsonReader& reader) {
    const bool integers = column.spec().type == ColumnType::kInt64;
    if (reader.at_bool()) {
      const std::int64_t value = reader.boolean();
      integers ? column.append(value) : void(column.append_real(static_cast<double>(value)));
      return;
    }
    const char* const wanted = integers ? "an integer of 64 bits" : "a number in the range of its type";
    require(reader.at_number(), column.spec(), wanted, reader);
    const JsonReader::Mark start = reader.mark();
    const JsonNumber number = reader.number();
    bool fits = false;
    if (integers) {
      constexpr std::uint64_t kLeast = std::uint64_t{1} << 63;
      fits = number.integral && number.exact && (!number.negative || number.digits <= kLeast);
      if (fits) column.append(static_cast<std::int64_t>(number.negative ? 0 - number.digits : number.digits));
    } else {
      const double value = number.value();
      fits = std::isfinite(value) && column.append_real(value);
    }
    if (fits) return;
    reader.go_back(start);
    require(false, column.spec(), wanted, reader);
  }

  static void require(bool fits, const ColumnSpec& spec, const char* wanted, JsonReader& reader) {
    if (fits) return;
    if (reader.next() == 'N' || reader.next() == 'I') reader.skip();  // NaN and Infinity, which are damage
    throw Mismatch{"field '" + spec.field + "': expected " + wanted + ", got " + reader.excerpt()};
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
    } else if (row_format == RecordFormat::kJson) {
      read_json(message);
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

  // Appends the rows of a record. Returns where to go on if not behind it, or if it has a problem.
  std::optional<Progress> add(wire::Bytes record, const Frame& frame, const Progress& at, std::size_t stride, std::size_t max_rows) {
    const std::size_t before = rows();
    const auto refused = [&](Problem problem, std::string message) {
      truncate(before);
      return Progress{at.frame + stride, 0, problem, std::move(message)};
    };
    try {
      if (format == RecordFormat::kExampleBatch) {
        const std::size_t total = parse_batch(record, at.row, max_rows - before);
        const std::size_t row = at.row + rows() - before;
        if (row < total) return Progress{at.frame, row, Problem::kNone, ""};
      } else {
        const RecordFormat by_type = frame.is_instance ? RecordFormat::kInstance : RecordFormat::kExample;
        parse_row(record, by_header ? by_type : format, frame);
      }
    } catch (const wire::Malformed&) {
      return refused(Problem::kCorrupt, "the record is not a valid message");
    } catch (const JsonDamage& damage) {
      return refused(Problem::kCorrupt, std::string("not JSON at byte ") + std::to_string(damage.at) + ": " + damage.what);
    } catch (const Mismatch& mismatch) {
      return refused(Problem::kSchema, mismatch.message);
    }
    return {};
  }

  RecordFormat format;
  bool by_header;
  std::vector<Column> columns;
  FieldNames names;
  std::vector<wire::Bytes> found;  // by name; no data: not in this record
  std::array<std::size_t, 1024> slot_columns;
  // Of JSON: which columns ask for a name, the last record that had it, and the last string with escapes.
  std::vector<std::vector<std::size_t>> columns_of_name;
  std::vector<std::uint64_t> seen_in;
  std::uint64_t json_records = 0;
  std::string scratch;
};

RecordParser::RecordParser(RecordFormat format, bool by_header, std::vector<ColumnSpec> columns)
    : impl_(std::make_unique<Impl>(format, by_header, std::move(columns))) {}

RecordParser::~RecordParser() = default;

std::size_t RecordParser::rows() const noexcept { return impl_->rows(); }

RecordParser::Progress RecordParser::add(std::span<const std::uint8_t> data, std::span<const Frame> frames, std::size_t frame,
                                         std::size_t row, std::size_t max_rows, std::size_t stride) {
  for (; frame < frames.size() && impl_->rows() < max_rows; frame += stride, row = 0) {
    const Frame& next = frames[frame];
    if (next.damage != Damage::kNone) return {frame + stride, 0, Problem::kCorrupt, explain(next.damage)};
    std::optional<Progress> stop = impl_->add(data.subspan(next.begin, next.end - next.begin), next, {frame, row, {}, {}}, stride, max_rows);
    if (stop) return *std::move(stop);
  }
  return {frame, row, Problem::kNone, ""};
}

RecordParser::Progress RecordParser::add(std::span<const std::span<const std::uint8_t>> messages, std::size_t frame, std::size_t row,
                                         std::size_t max_rows, const MessageOptions& options) {
  for (; frame < messages.size() && impl_->rows() < max_rows; ++frame, row = 0) {
    wire::Bytes record = messages[frame];
    if (record.size() > options.max_bytes) {
      return {frame + 1, 0, Problem::kCorrupt, "the record has " + std::to_string(record.size()) + " bytes, more than max_record_bytes, " +
                                                   std::to_string(options.max_bytes)};
    }
    Frame own{0, 0, record.size(), 0, false, Damage::kNone};
    if (options.header) {
      try {
        own = only_frame(record, options);
      } catch (Mismatch& mismatch) {
        return {frame + 1, 0, Problem::kCorrupt, std::move(mismatch.message)};
      }
      record = record.subspan(own.begin, own.end - own.begin);
    }
    std::optional<Progress> stop = impl_->add(record, own, {frame, row, {}, {}}, 1, max_rows);
    if (stop) return *std::move(stop);
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
