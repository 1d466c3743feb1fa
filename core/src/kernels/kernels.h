// The arithmetic on rows, as functions over batches of row pointers, one set per instruction set. Everything here is plain
// data: the kernels are compiled several times with different flags and must not emit inline library code (CMakeLists.txt).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bucket.h"
#include "monolith/config.h"

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
  std::uint64_t update;  // number of the call that makes these steps: stochastic rounding must not repeat its draws
  float* scratch;  // room for 2 * dim floats
};

struct Kernels {
  const char* isa;
  // Writes the initial weights and optimizer state of the id behind `id_key`.
  void (*initialize)(const SegmentPlan&, std::uint64_t id_key, std::byte* row);
  // What a lookup of a just initialised row returns, without having the row. value: dim floats.
  void (*initial_value)(const SegmentPlan&, float hashnet_scale, std::uint64_t id_key, float* value);
  // outs[i][0..dim) = read path of rows[i]. outs point at the segment's first float.
  void (*read)(const SegmentPlan&, float hashnet_scale, const std::byte* const* rows, float* const* outs, std::size_t n);
  // outs[i][0..dim) += read path of rows[i]. Equal outs are allowed.
  void (*accumulate)(const SegmentPlan&, float hashnet_scale, const std::byte* const* rows, float* const* outs,
                     std::size_t n, float* scratch);
  // One optimizer step per row, in order. grads and snapshots (may be null) point at the whole gradient of the row.
  void (*step)(const SegmentPlan&, const StepContext&, std::byte* const* rows, const float* const* grads,
               const float* const* snapshots, const std::uint64_t* id_keys, std::size_t n);
  // The stored weights as floats, without read path; and back, rounding to nearest.
  void (*load)(const SegmentPlan&, const std::byte* row, float* value);
  void (*store)(const SegmentPlan&, const float* value, std::byte* row);
  // slots[i] = the slot of ids[i] in buckets[i], or some slot if it is not there; the positions of those go to `rest`, their
  // number is returned.
  std::size_t (*match)(const Bucket* const* buckets, const std::int64_t* ids, std::size_t n, std::uint8_t* slots,
                       std::uint16_t* rest);
  // out += in * factor
  void (*add_scaled)(float* out, const float* in, float factor, std::size_t n);
  void (*scale)(float* out, float factor, std::size_t n);
};

// The sets this machine can run, slowest first, and the fastest of them.
const std::vector<const Kernels*>& all_kernels();
const Kernels& kernels();

// The quantile of the standard normal distribution, for p in (0, 1). Not per instruction set: its bits must not vary.
double normal_quantile(double p) noexcept;

}  // namespace monolith
