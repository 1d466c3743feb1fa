// Bags whose ids were made distinct, as unique_with_inverse does: the row of id i is rows[places[i]]. Pooling reads a row for each
// id where it is, and a gradient is added where it belongs; nothing is spread out in between.
//
// Thread-safety: pure functions; the caller keeps the arrays unchanged while a call runs. Each runs on the calling thread.
// Ownership: the caller owns every array; outputs may be uninitialised and must not overlap inputs. M ids in B bags, R rows,
// D columns; row_splits is as in ragged.h.
// Failure: InvalidArgument, naming the first offending index and value, before any output is written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace monolith {

// out [B, D]: out[b] = the sum of rows[places[i]] over the ids i of bag b, from 0 and in order, as `pool` adds. rows is [R, D].
void pool_places(std::span<const float> rows, std::span<const std::int64_t> places, std::span<const std::int64_t> row_splits,
                 std::size_t dim, std::span<float> out);

// The other way, out [R, D]: out[r] = the sum of grads[b] over the ids of place r, from 0 and in order, where b is the bag of the id.
// grads is [B, D]. A place that no id has gets zeros.
void sum_places(std::span<const float> grads, std::span<const std::int64_t> places, std::span<const std::int64_t> row_splits,
                std::size_t dim, std::span<float> out);

}  // namespace monolith
