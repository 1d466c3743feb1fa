// Kernels over ragged batches. Row i of a ragged batch with values v and row splits s is v[s[i] .. s[i+1]); s has one entry more
// than there are rows, starts with 0, never decreases and ends with the number of values.
//
// Thread-safety: pure functions; the caller keeps the arrays unchanged while a call runs. Each runs on the calling thread.
// Ownership: the caller owns every array; outputs may be uninitialised and must not overlap inputs. M values, B rows, D columns.
// Failure: InvalidArgument, naming the first offending index and value, before any output is written; std::bad_alloc for scratch
// memory (unique_with_inverse: at most 32 bytes per id; the splits: 4 bytes per id), after which outputs are unspecified.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace monolith {

// Throws InvalidArgument unless row_splits describes num_values values. Splits cut out of longer ones start with another `first`.
void check_row_splits(std::span<const std::int64_t> row_splits, std::size_t num_values, std::int64_t first = 0);

// out[j] = the row that value j belongs to. out has M entries.
void value_rowids(std::span<const std::int64_t> row_splits, std::span<std::int64_t> out);

// How the rows of a bag become one. With n rows x:
//   kSum    sum(x)             kMean  sum(x) / n
//   kSqrtN  sum(x) / sqrt(n)   kL2    sqrt(sum(x * x)) by element, which the original calls reduce_sqrtn
// An empty bag gives zeros. Rows are added in order, in float, so results do not depend on the machine.
enum class Reduction : std::uint8_t { kSum, kMean, kSqrtN, kL2 };

// rows [M, D] -> out [B, D].
void pool(Reduction reduction, std::span<const float> rows, std::span<const std::int64_t> row_splits, std::size_t dim,
          std::span<float> out);

// The gradient of `pool` by rows: grad_out [B, D] -> grad_rows [M, D]. rows and pooled (what pool gave) are read for kL2 only
// and may be empty otherwise; where a norm is 0 the gradient of kL2 is 0.
void pool_gradient(Reduction reduction, std::span<const float> grad_out, std::span<const float> rows,
                   std::span<const float> pooled, std::span<const std::int64_t> row_splits, std::size_t dim,
                   std::span<float> grad_rows);

// Distinct ids in the order of their first occurrence. unique and inverse have as many entries as ids; the first R of unique are
// set, where R is the number returned, and ids[i] == unique[inverse[i]]. counts is empty or has as many entries as ids; the first
// R are set to the numbers of occurrences. Takes up to 2^32 - 2 ids.
std::size_t unique_with_inverse(std::span<const std::int64_t> ids, std::span<std::int64_t> unique,
                                std::span<std::int64_t> inverse, std::span<std::int64_t> counts = {});

// A stable partition. order has as many entries as there are items: order[k] is the item at place k after grouping, so
// grouped[k] = items[order[k]]. sizes has one entry per part.

// By part numbers 0 .. sizes.size() - 1.
void split_by_indices(std::span<const std::int64_t> indices, std::span<std::int64_t> order, std::span<std::int64_t> sizes);

// By owner: shard = id % sizes.size() with the id taken as unsigned (one convention for every id, negative ones included).
// grouped_ids is empty or receives the ids in their new order.
void split_by_shard(std::span<const std::int64_t> ids, std::span<std::int64_t> order, std::span<std::int64_t> sizes,
                    std::span<std::int64_t> grouped_ids = {});

// Splits the values of a ragged batch by part numbers; every part keeps all B rows. part_splits is [parts, B + 1]: the row
// splits of each part's values, which are values[order[...]], parts one after the other.
void split_ragged_by_indices(std::span<const std::int64_t> indices, std::span<const std::int64_t> row_splits,
                             std::span<std::int64_t> order, std::span<std::int64_t> sizes,
                             std::span<std::int64_t> part_splits);

// out[order[k]] = grouped[k] for rows of row_bytes bytes: undoes a split. order must be a permutation.
void restore_order(const void* grouped, std::size_t row_bytes, std::span<const std::int64_t> order, void* out);

// out[k] = rows[order[k]] for rows of row_bytes bytes, 0 <= order[k] < num_rows.
void gather_rows(const void* rows, std::size_t num_rows, std::size_t row_bytes, std::span<const std::int64_t> order,
                 void* out);

}  // namespace monolith
