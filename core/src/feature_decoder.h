// The values of one feature message, of any format, into a column.
#pragma once

#include "column_builder.h"
#include "monolith/record_parser.h"
#include "wire.h"

namespace monolith {

// Appends the values of `feature` (tensorflow.Feature, Feature, or the Feature of an Instance) to the row that `column` has begun.
// Throws wire::Malformed, or Mismatch if the values are of another type or nesting than the column's.
void append_feature(ColumnBuilder& column, wire::Bytes feature, RecordFormat format);

}  // namespace monolith
