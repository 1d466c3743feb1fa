// The arithmetic on rows, as functions over batches of row pointers, one set per instruction set. Everything here is plain
// data: the kernels are compiled several times with different flags and must not emit inline library code (CMakeLists.txt).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "monolith/config.h"
#include "row_addresses.h"
#include "shard_view.h"

namespace monolith {

enum class Storage : std::uint8_t { kFp32, kFp16, kBf16, kFixed8, kSign8 };
enum class ReadPath : std::uint8_t { kRaw, kFakeQuant, kHashNet };

// One segment as the kernels see it.
struct SegmentPlan {
  std::uint32_t dim;
  std::uint32_t value_offset;
  std::uint32_t weight_offset;
  std::uint32_t state_offset;
  Initializer initializer;
  Optimizer optimizer;
  Storage storage;
  ReadPath read_path;
  bool stochastic_rounding;
  bool has_state;   // training tables only
  float quantum;    // fixed_r8: range / 128
  float amplitude;  // one_bit
};

// What one batch of steps shares.
struct StepContext {
  float learning_rate;
  float hashnet_scale;
  std::int64_t step;
  float* scratch;  // room for 2 * dim floats
};

// What all lookups of a table share.
struct LookupPlan {
  const ShardView* shards;  // [kShards]
  RowAddresses rows;
  const SegmentPlan* segments;
  std::size_t num_segments;
  const float* hashnet_scales;  // one per segment
  std::uint64_t table_key;
  std::uint32_t dim;
  std::size_t out_stride;      // floats from the vector of a bag to that of the next
  std::uint32_t weight_lines;  // cache lines that the weights of a row may touch
  bool unseen_reads_zeros;
  bool rows_are_updated;  // by somebody, in turns with lookups; changes nothing but speed
};

// Ids of one stage of an update before the next stage has its turn: many, so that fetches follow each other closely (fetch.h), but not
// more than the second cache has room for.
inline constexpr std::size_t kUpdateTurn = 512;

// What all gradients of a call share. Ids are in shard order.
struct UpdatePlan {
  const ShardView* shards;  // [kShards]
  RowAddresses rows;
  const std::int64_t* ids;
  const std::uint32_t* tags;  // which gradient is an id's
  const float* grads;
  std::size_t grad_stride;  // floats from a gradient to the next
  const float* const* grad_rows;  // where each gradient is, or null: at its place in grads
  const std::int64_t* counts;     // how often each gradient's id occurred, or null: once
  const float* snapshot;    // [gradients, dim], or null
  std::uint64_t table_key;
  std::uint32_t call;  // its number, if segments round stochastically
  std::uint32_t dim;
  std::uint32_t row_lines;  // cache lines that a row may touch
  std::uint32_t event_time;
  bool sequential;    // an id that occurs twice makes two steps
  bool rounding_keys;  // somebody needs them
};

inline constexpr std::uint32_t kSummed = 1u << 31;

// The ids of one or a few shards on their way through the stages of an update. All arrays have room for all of them.
struct UpdateUnit {
  std::size_t next = 0, last = 0;  // the part of the call that is not collected yet
  bool tracked = false;            // changes are to be remembered

  // By unique id.
  std::size_t size = 0;
  std::int64_t* ids;
  std::uint64_t* hashes;
  Bucket** buckets;  // the first bucket of the id
  std::uint32_t* counts;  // how often it occurred, plus kSummed if its gradient is in sums
  const float** grads;
  const float** snapshots;  // of the first occurrence, if the plan has any
  std::uint64_t* rounding_keys;
  std::byte** rows;
  Bucket::Match* matches;  // if tracked
  std::size_t matched = 0;

  std::uint32_t* unmatched;  // positions of those that were not in their first bucket
  std::size_t num_unmatched = 0;

  std::uint32_t* places;  // a hash table of positions, plus 1
  std::uint64_t place_mask = 0;
  float* sums;  // gradients of ids that occur more than once
  std::size_t num_sums = 0;
};

// The factor by which the sum over a bag of n ids is multiplied.
[[gnu::always_inline]] inline float pooling_factor(Pooling pooling, std::int64_t n) noexcept {
  if (pooling == Pooling::kSum || n == 0) return 1;
  const float count = static_cast<float>(n);
  return 1 / (pooling == Pooling::kMean ? count : __builtin_sqrtf(count));
}

// Examples of n vectors, at least one, of k floats: dense, if it is not null, and those of x.
struct PairBatch {
  std::size_t size, n, k;
  const float* dense;  // [size, k]
  const float* x;      // [size, n, k], or n - 1 beside a dense one
};

// out [m, n] = a [m, k] b [k, n] + bias, with the distances from one row, column or k to the next.
struct MatrixProduct {
  std::size_t m, n, k;
  const float* a;
  std::size_t a_row, a_k;
  const float* b;
  std::size_t b_column, b_k;
  const float* bias;  // or null
  std::size_t bias_row, bias_column;
  float* out;
  std::size_t out_row, out_column;
};

struct Kernels {
  const char* isa;
  // Writes the initial weights and optimizer state of the id behind `id_key`.
  void (*initialize)(const SegmentPlan&, std::uint64_t id_key, std::byte* row);
  // What a lookup of a just initialised row returns, without having the row. value: dim floats.
  void (*initial_value)(const SegmentPlan&, float hashnet_scale, std::uint64_t id_key, float* value);
  // out: [bags, dim]; bag b is ids[row_splits[b] - row_splits[0]] up to ids[row_splits[b + 1] - row_splits[0]], or ids[b] alone
  // if row_splits is null. Rows are summed in order. scratch: dim floats. Nothing may change the shards meanwhile.
  void (*lookup)(const LookupPlan&, const std::int64_t* ids, const std::int64_t* row_splits, std::size_t bags, Pooling,
                 float* out, float* scratch);
  void (*find_shards)(const std::int64_t* ids, std::size_t n, std::uint8_t* shards);
  // Collects the ids up to `last` of the call, at most kUpdateTurn: unique ones, and the sums of their gradients in call order.
  // Starts fetching their buckets.
  void (*collect)(const UpdatePlan&, UpdateUnit&, std::size_t last);
  // Looks for the unique ids up to `last` in their first buckets, fetches their rows and, if nobody has to remember what changed,
  // sets their times. Nothing is done about those that are not there.
  void (*match)(const UpdatePlan&, UpdateUnit&, std::size_t last);
  // One optimizer step per row, in order. grads and snapshots (may be null) point at the whole gradient of the row;
  // rounding_keys, one per row, are what stochastic rounding draws from, and may be null where nothing rounds so.
  void (*step)(const SegmentPlan&, const StepContext&, std::byte* const* rows, const float* const* grads,
               const float* const* snapshots, const std::uint64_t* rounding_keys, std::size_t n);
  // The stored weights as floats, without read path; and back, rounding to nearest.
  void (*load)(const SegmentPlan&, const std::byte* row, float* value);
  void (*store)(const SegmentPlan&, const float* value, std::byte* row);
  // out = a + b; out may be a.
  void (*add)(float* out, const float* a, const float* b, std::size_t n);
  void (*scale)(float* out, float factor, std::size_t n);
  // Of monolith/pairs.h. Scratch of dot_pairs: k columns of n floats, n rounded up to eights, the vectors of an example, its pairs and
  // eight floats more; of its gradient: twice the vectors of an example, if there is a dense one.
  void (*dot_pairs)(const PairBatch&, float* out, float* scratch);
  void (*dot_pairs_gradient)(const PairBatch&, const float* grads, float* grad_dense, float* grad_x, float* scratch);
  void (*sum_pairs)(const PairBatch&, float* out);
  void (*sum_pairs_gradient)(const PairBatch&, const float* grads, float* grad_x);
  // dot_product: a_k and b_k are 1. column_product: b_column and out_column are 1.
  void (*dot_product)(const MatrixProduct&);
  void (*column_product)(const MatrixProduct&);
};

// The sets this machine can run, slowest first, and the fastest of them.
const std::vector<const Kernels*>& all_kernels();
const Kernels& kernels();

// The quantile of the standard normal distribution, for p in (0, 1). Not per instruction set: its bits must not vary.
double normal_quantile(double p) noexcept;

}  // namespace monolith
