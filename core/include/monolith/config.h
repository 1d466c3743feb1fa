// What a table is made of. Plain values; Table's constructor validates them.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace monolith {

enum class InitializerKind : std::uint8_t { kConstant, kUniform, kNormal, kTruncatedNormal };

// kConstant: value a. kUniform: [a, b). kNormal and kTruncatedNormal (within two deviations): mean a, deviation b.
struct Initializer {
  InitializerKind kind = InitializerKind::kConstant;
  float a = 0;
  float b = 0;
};

// The numbers are written into table files: append only.
enum class OptimizerKind : std::uint8_t {
  kSgd = 0,
  kMomentum = 1,
  kAdagrad = 2,
  kDynamicWdAdagrad = 3,
  kRowwiseAdagrad = 4,
  kAdadelta = 5,
  kAdam = 6,
  kAmsgrad = 7,
  kAdamom = 8,
  kRmsprop = 9,
  kRmspropV2 = 10,
  kFtrl = 11,
  kGroupFtrl = 12,
  kGroupAdagrad = 13,
  kMovingAverage = 14,
  kBatchSoftmax = 15,
};

// Hyperparameters of all optimizers; each reads only its own (see the formulas in kernels/optimizers.h).
struct Optimizer {
  OptimizerKind kind = OptimizerKind::kSgd;
  float initial_accumulator = 0;
  float weight_decay = 0;
  float epsilon = 0;
  float momentum = 0;   // momentum, averaging ratio, mom_decay
  float beta1 = 0;      // beta1, and beta of the FTRL family and group adagrad
  float beta2 = 0;      // beta2, ada_decay
  float l1 = 0;
  float l2 = 0;
  bool nesterov = false;
  bool decouple_weight_decay = false;
  float delay_compensation = 0;  // lambda of DC; 0 = off
};

enum class Precision : std::uint8_t { kFp32 = 0, kFp16 = 1, kBf16 = 2 };

enum class CompressorKind : std::uint8_t { kFp32 = 0, kFp16 = 1, kBf16 = 2, kFixedR8 = 3, kOneBit = 4 };

struct Compressor {
  CompressorKind kind = CompressorKind::kFp32;
  float range = 1;        // fixed_r8
  float amplitude = 0.05f;  // one_bit, as are the following
  float init_scale = 1;
  float max_scale = 10000;
  std::int64_t step_size = 200;
};

struct Segment {
  std::uint32_t dim = 0;
  Initializer initializer;
  Optimizer optimizer;
  Precision precision = Precision::kFp32;
  bool stochastic_rounding = false;
  Compressor compressor;
};

enum class Pooling : std::uint8_t { kSum, kMean, kSqrtN };

enum class Mode : std::uint8_t { kTraining = 0, kServing = 1 };

struct TableConfig {
  std::string name;
  std::vector<Segment> segments;
  std::uint64_t seed = 0;
  Mode mode = Mode::kTraining;
  bool unseen_reads_zeros = false;
  bool skip_zero_rows = false;
  std::uint64_t initial_capacity = 0;
  std::uint64_t default_expiry_seconds = 36500ull * 86400;
  std::unordered_map<std::uint32_t, std::uint64_t> slot_expiry_seconds;
};

}  // namespace monolith
