// Compiled once per instruction set with MONOLITH_ISA as namespace; see CMakeLists.txt and kernels.h.
#include "kernels/kernels.h"

#include "kernels/number_formats.h"
#include "kernels/optimizers.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

inline std::uint32_t mix32(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 32 uniform bits for element i of an id: both halves of its key pass through a full mix.
inline std::uint32_t random_bits(std::uint64_t key, std::uint32_t i) {
  const std::uint32_t low = static_cast<std::uint32_t>(key);
  const std::uint32_t high = static_cast<std::uint32_t>(key >> 32);
  return mix32(mix32(low + i * 0x9E3779B9u) ^ high);
}

// Calls f with the dim as a constant where it is a common one, so that its loops are unrolled: a row is a handful of vector
// instructions, and the bookkeeping of a loop of unknown length would take longer.
template <typename F>
inline void with_dim(std::uint32_t dim, F&& f) {
  switch (dim) {
    case 16: return f([] { return 16u; });
    case 32: return f([] { return 32u; });
    case 64: return f([] { return 64u; });
    default: return f([dim] { return dim; });
  }
}

template <typename Dim>
void initial_weights(const SegmentPlan& plan, Dim dim, std::uint64_t key, float* __restrict w) {
  const Initializer init = plan.initializer;
  const std::uint32_t first = plan.value_offset;
  switch (init.kind) {
    case InitializerKind::kConstant:
      for (std::uint32_t i = 0; i < dim(); ++i) w[i] = init.a;
      return;
    case InitializerKind::kUniform: {
      const float width = init.b - init.a;
      for (std::uint32_t i = 0; i < dim(); ++i) {
        const std::int32_t bits = static_cast<std::int32_t>(random_bits(key, first + i) >> 8);
        const float value = init.a + width * (static_cast<float>(bits) * 0x1p-24f);
        // Rounding may reach the open end of [a, b); a itself is as good a value as any.
        w[i] = value < init.b ? value : init.a;
      }
      return;
    }
    case InitializerKind::kNormal:
    case InitializerKind::kTruncatedNormal: {
      // Truncation at two deviations is a restriction of the quantile's argument to [Phi(-2), Phi(2)].
      constexpr double kTail = 0.022750131948179209;
      const bool truncated = init.kind == InitializerKind::kTruncatedNormal;
      const double low = truncated ? kTail : 0;
      const double width = truncated ? 1 - 2 * kTail : 1;
      for (std::uint32_t i = 0; i < dim(); ++i) {
        const double u = (static_cast<double>(random_bits(key, first + i)) + 0.5) * 0x1p-32;
        w[i] = static_cast<float>(init.a + init.b * normal_quantile(low + width * u));
      }
      return;
    }
  }
}

void load(const SegmentPlan& plan, const std::byte* row, float* __restrict value) {
  const std::byte* stored = row + plan.weight_offset;
  const std::uint16_t* halves = reinterpret_cast<const std::uint16_t*>(stored);
  const std::int8_t* codes = reinterpret_cast<const std::int8_t*>(stored);
  switch (plan.storage) {
    case Storage::kFp32: __builtin_memcpy(value, stored, plan.dim * sizeof(float)); return;
    case Storage::kFp16:
      for (std::uint32_t i = 0; i < plan.dim; ++i) value[i] = half_to_float(halves[i]);
      return;
    case Storage::kBf16:
      for (std::uint32_t i = 0; i < plan.dim; ++i) value[i] = bfloat_to_float(halves[i]);
      return;
    case Storage::kFixed8:
      for (std::uint32_t i = 0; i < plan.dim; ++i) value[i] = fixed8_to_float(codes[i], plan.quantum);
      return;
    case Storage::kSign8:
      for (std::uint32_t i = 0; i < plan.dim; ++i) value[i] = static_cast<float>(codes[i]) * plan.amplitude;
      return;
  }
}

void store(const SegmentPlan& plan, const float* value, std::byte* row) {
  std::byte* stored = row + plan.weight_offset;
  std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(stored);
  std::int8_t* codes = reinterpret_cast<std::int8_t*>(stored);
  switch (plan.storage) {
    case Storage::kFp32: __builtin_memcpy(stored, value, plan.dim * sizeof(float)); return;
    case Storage::kFp16:
      for (std::uint32_t i = 0; i < plan.dim; ++i) halves[i] = float_to_half(value[i]);
      return;
    case Storage::kBf16:
      for (std::uint32_t i = 0; i < plan.dim; ++i) halves[i] = float_to_bfloat(value[i]);
      return;
    case Storage::kFixed8:
      for (std::uint32_t i = 0; i < plan.dim; ++i) codes[i] = float_to_fixed8(value[i], plan.quantum);
      return;
    case Storage::kSign8:
      for (std::uint32_t i = 0; i < plan.dim; ++i) codes[i] = value[i] > 0 ? 1 : -1;
      return;
  }
}

void store_stochastic(const SegmentPlan& plan, const float* value, std::byte* row, std::uint64_t key) {
  std::uint16_t* halves = reinterpret_cast<std::uint16_t*>(row + plan.weight_offset);
  for (std::uint32_t i = 0; i < plan.dim; ++i) {
    const std::uint32_t random = random_bits(key, plan.value_offset + i) >> 8;
    halves[i] = plan.storage == Storage::kFp16 ? float_to_half_stochastic(value[i], random)
                                               : float_to_bfloat_stochastic(value[i], random);
  }
}

void apply_read_path(const SegmentPlan& plan, float scale, float* value) {
  if (plan.read_path == ReadPath::kFakeQuant) {
    for (std::uint32_t i = 0; i < plan.dim; ++i) {
      value[i] = fixed8_to_float(float_to_fixed8(value[i], plan.quantum), plan.quantum);
    }
  } else if (plan.read_path == ReadPath::kHashNet) {
    for (std::uint32_t i = 0; i < plan.dim; ++i) value[i] = plan.amplitude * __builtin_tanhf(scale * value[i]);
  }
}

inline bool is_plain(const SegmentPlan& plan) {
  return plan.storage == Storage::kFp32 && plan.read_path == ReadPath::kRaw;
}

void initialize(const SegmentPlan& plan, std::uint64_t key, std::byte* row) {
  if (plan.storage == Storage::kFp32) {
    float* const weights = reinterpret_cast<float*>(row + plan.weight_offset);
    with_dim(plan.dim, [&](auto dim) { initial_weights(plan, dim, key, weights); });
  } else {
    float weights[256];
    // Wide half-precision segments are initialised piece by piece, to need no scratch memory.
    SegmentPlan piece = plan;
    const std::uint32_t width = plan.storage == Storage::kFp16 || plan.storage == Storage::kBf16 ? 2 : 1;
    for (std::uint32_t done = 0; done < plan.dim; done += piece.dim) {
      piece.dim = plan.dim - done < 256 ? plan.dim - done : 256;
      piece.value_offset = plan.value_offset + done;
      piece.weight_offset = plan.weight_offset + done * width;
      initial_weights(piece, [&] { return piece.dim; }, key, weights);
      store(piece, weights, row);
    }
  }
  if (!plan.has_state) return;
  float* state = reinterpret_cast<float*>(row + plan.state_offset);
  with_optimizer(plan.optimizer.kind, [&](auto optimizer) {
    with_dim(plan.dim, [&](auto dim) { optimizer.init(plan.optimizer, state, dim()); });
  });
}

// Eight floats at any address. The compiler does not trust that row and output do not overlap, and would move single floats. Not
// `using Vector = float __attribute__`, in which clang ignores the alignment without a word and crashes at the first address that is
// not a multiple of 32. Nor may Vector be the argument of a template: see float_vectors.h.
typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));
static_assert(alignof(Vector) == alignof(float));

void add(float* out, const float* a, const float* b, std::size_t n) {
  std::size_t j = 0;
  for (; j + 8 <= n; j += 8) {
    *reinterpret_cast<Vector*>(out + j) = *reinterpret_cast<const Vector*>(a + j) + *reinterpret_cast<const Vector*>(b + j);
  }
  for (; j < n; ++j) out[j] = a[j] + b[j];
}

// The gradient the optimizer sees: through the HashNet read path, then delay-compensated.
const float* transform_gradient(const SegmentPlan& plan, const StepContext& context, const float* w, const float* g,
                                const float* snapshot, float* out) {
  if (plan.read_path == ReadPath::kHashNet) {
    const float slope = plan.amplitude * context.hashnet_scale;
    for (std::uint32_t i = 0; i < plan.dim; ++i) {
      const float t = __builtin_tanhf(context.hashnet_scale * w[i]);
      out[i] = g[i] * slope * (1 - t * t);
    }
    g = out;
  }
  const float lambda = plan.optimizer.delay_compensation;
  if (lambda > 0 && snapshot != nullptr) {
    for (std::uint32_t i = 0; i < plan.dim; ++i) out[i] = g[i] + lambda * g[i] * g[i] * (w[i] - snapshot[i]);
    g = out;
  }
  return g;
}

void step(const SegmentPlan& shared_plan, const StepContext& shared_context, std::byte* const* rows, const float* const* grads,
          const float* const* snapshots, const std::uint64_t* keys, std::size_t n) {
  // Copies, that no store can change: the compiler would read everything again for every row.
  const SegmentPlan plan = shared_plan;
  const StepContext context = shared_context;
  const auto run = [&](auto optimizer, auto dim) {
    const bool as_is = plan.read_path != ReadPath::kHashNet && (plan.optimizer.delay_compensation == 0 || !snapshots);
    for (std::size_t i = 0; i < n; ++i) {
      float* state = reinterpret_cast<float*>(rows[i] + plan.state_offset);
      const float* g = grads[i] + plan.value_offset;
      float* w = context.scratch;
      if (plan.storage == Storage::kFp32) {
        w = reinterpret_cast<float*>(rows[i] + plan.weight_offset);
      } else {
        load(plan, rows[i], w);
      }
      if (!as_is) {
        const float* snapshot = snapshots ? snapshots[i] + plan.value_offset : nullptr;
        g = transform_gradient(plan, context, w, g, snapshot, context.scratch + plan.dim);
      }
      optimizer.step(plan.optimizer, context, w, state, g, dim());
      if (plan.storage == Storage::kFp32) continue;
      if (plan.stochastic_rounding) {
        store_stochastic(plan, w, rows[i], keys[i]);
      } else {
        store(plan, w, rows[i]);
      }
    }
  };
  with_optimizer(plan.optimizer.kind, [&](auto optimizer) { with_dim(plan.dim, [&](auto dim) { run(optimizer, dim); }); });
}

void initial_value(const SegmentPlan& plan, float scale, std::uint64_t key, float* value) {
  with_dim(plan.dim, [&](auto dim) { initial_weights(plan, dim, key, value); });
  for (std::uint32_t i = 0; i < plan.dim; ++i) {
    switch (plan.storage) {
      case Storage::kFp32: break;
      case Storage::kFp16: value[i] = half_to_float(float_to_half(value[i])); break;
      case Storage::kBf16: value[i] = bfloat_to_float(float_to_bfloat(value[i])); break;
      case Storage::kFixed8: value[i] = fixed8_to_float(float_to_fixed8(value[i], plan.quantum), plan.quantum); break;
      case Storage::kSign8: value[i] = value[i] > 0 ? plan.amplitude : -plan.amplitude; break;
    }
  }
  apply_read_path(plan, scale, value);
}

void scale(float* out, float factor, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) out[i] *= factor;
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith

#include "kernels/lookup.h"
#include "kernels/pairs.h"
#include "kernels/update.h"
// After pairs.h, whose vector_at it takes.
#include "kernels/dense.h"

namespace monolith {
namespace MONOLITH_ISA {

#define MONOLITH_TEXT_INNER(x) #x
#define MONOLITH_TEXT(x) MONOLITH_TEXT_INNER(x)

extern const Kernels kKernels;
const Kernels kKernels = {MONOLITH_TEXT(MONOLITH_ISA),
                          initialize,
                          initial_value,
                          lookup,
                          find_shards,
                          collect,
                          match,
                          step,
                          load,
                          store,
                          add,
                          scale,
                          dot_pairs,
                          dot_pairs_gradient,
                          sum_pairs,
                          sum_pairs_gradient,
                          dot_product,
                          column_product};

}  // namespace MONOLITH_ISA
}  // namespace monolith
