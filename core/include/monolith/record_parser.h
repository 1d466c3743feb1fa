// Turns serialized rows into columns: tf.train.Example, the original's Example, ExampleBatch and Instance, and JSON.
//
// A column's field is the name of a feature. In the original's formats these names are reserved:
//   label, instance_weight, data_source_key   the message's own fields (in an ExampleBatch `__LABEL__`, `instance_weight`)
//   line_id.<field>                           a field of the row's LineId (in an ExampleBatch: of `__LINE_ID__`)
// and in an Instance `slot_<n>` or `fc_slot_<n>` also finds the ids of slot n in the flat list. Version 1 fids are always converted to
// version 2. A missing feature is an empty row, or the fill value of a fixed column. instance_weight <= 0 becomes 1. A label
// shorter than the column is filled up.
//
// JSON: one object in each record, strict (json_reader.h). An int64 column takes integers without fraction and exponent, of 64 bits
// with or without sign (ids use all bits), a float column any number that is finite in its type, both true and false as 1 and 0, a
// bytes column strings. Lists are as long as the row; a number is also a list of one. Nested columns take lists of lists of numbers, or
// lists of strings. null is a missing field, but not a value of a list. A field that a column asks for may be there only once. Others
// are skipped, after checking that they are JSON.
//
// Thread-safety: one call at a time. Ownership: the parser copies what it keeps; `data` may go after a call.
// Failure: InvalidArgument from the constructor for columns no record can have; std::bad_alloc, after which the parser must not
// be used. A record that cannot be used is an answer (Progress::problem), and leaves no trace in the columns.
// Memory: a record of n bytes adds at most 8 n bytes to a column; an ExampleBatch at most kMaxRows rows and kMaxSpread values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "monolith/columns.h"
#include "monolith/framing.h"

namespace monolith {

enum class RecordFormat : std::uint8_t { kTfExample, kExample, kExampleBatch, kInstance, kJson };

enum class Problem : std::uint8_t {
  kNone,
  kCorrupt,  // damaged frame, or bytes that are not the message
  kSchema,   // a well-formed message without a column, or with one of another type or length
};

// How a record lies in a message of a queue.
struct MessageOptions {
  std::size_t max_bytes = std::size_t{128} << 20;
  // The message is a single record with this header and its length before it, as in a record file. None: it is just the record.
  std::optional<RecordHeader> header;
};

class RecordParser {
 public:
  // Rows of one ExampleBatch, and values that a feature it stores once may take up when every row gets its own copy.
  static constexpr std::size_t kMaxRows = std::size_t{1} << 20;
  static constexpr std::size_t kMaxSpread = std::size_t{1} << 24;

  // `by_header`: each frame's lagrangex header says whether it is an Instance or an Example.
  RecordParser(RecordFormat format, bool by_header, std::vector<ColumnSpec> columns);
  ~RecordParser();
  RecordParser(const RecordParser&) = delete;
  RecordParser& operator=(const RecordParser&) = delete;

  // Where to go on: row `row` of frame `frame`. After a problem: behind the frame that has it.
  struct Progress {
    std::size_t frame;
    std::size_t row;
    Problem problem;
    std::string message;
  };

  // Appends the rows of frames[frame..], beginning with row `row` of the first, until there are `max_rows` rows in the columns, the
  // frames end, or one has a problem. Takes every `stride`-th frame only, so that several readers can share a file.
  Progress add(std::span<const std::uint8_t> data, std::span<const Frame> frames, std::size_t frame, std::size_t row,
               std::size_t max_rows, std::size_t stride = 1);

  // The same for records that lie anywhere in memory. `frame` counts messages.
  Progress add(std::span<const std::span<const std::uint8_t>> messages, std::size_t frame, std::size_t row, std::size_t max_rows,
               const MessageOptions& options);

  std::size_t rows() const noexcept;

  // The columns, in the order of the specs; the parser starts anew with none.
  std::vector<ColumnData> take();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace monolith
