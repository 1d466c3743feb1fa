// All rows of some buckets, without walking over the others: what is saved, moved or removed by bucket is found with it.
#pragma once

#include "monolith/buckets.h"
#include "monolith/table.h"

namespace monolith {

// A scan as Table::scan is one, which must outlive it.
class BucketScan {
 public:
  // Throws InvalidArgument for buckets that are none.
  BucketScan(const Table& table, BucketRange buckets);

  // Appends copies of the rows of one index block that are in the buckets, perhaps of none; false when nothing was left.
  bool next(RowBatch& batch);

 private:
  const Table& table_;
  BucketRange buckets_;
  Cursor cursor_;
};

// Throws InvalidArgument unless there are such buckets.
void check_buckets(BucketRange buckets);

}  // namespace monolith
