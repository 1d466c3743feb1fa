#include "layout.h"

#include <cmath>
#include <sstream>

#include "monolith/error.h"

namespace monolith {
namespace {

constexpr std::uint32_t kMaxDim = 65536;

struct SlotShape {
  const char* name;
  bool scalar;
  bool is_int64 = false;
};

struct OptimizerInfo {
  const char* name;
  std::vector<SlotShape> slots;
};

const OptimizerInfo& info(OptimizerKind kind) {
  static const std::vector<OptimizerInfo> table = {
      {"sgd", {}},
      {"momentum", {{"n", false}}},
      {"adagrad", {{"norm", false}}},
      {"dynamic_wd_adagrad", {{"norm", false}}},
      {"rowwise_adagrad", {{"norm", true}}},
      {"adadelta", {{"accum", false}, {"accum_update", false}}},
      {"adam", {{"m", false}, {"v", false}, {"beta1_power", true}, {"beta2_power", true}}},
      {"amsgrad", {{"m", false}, {"v", false}, {"vhat", false}, {"beta1_power", true}, {"beta2_power", true}}},
      {"adamom", {{"m", false}, {"v", false}, {"c", true}}},
      {"rmsprop", {{"n", false}}},
      {"rmsprop_v2", {{"n", false}}},
      {"ftrl", {{"zero", false}, {"norm", false}}},
      {"group_ftrl", {{"zero", false}, {"norm", false}}},
      {"group_adagrad", {{"grad_square_sum", true}}},
      {"moving_average", {}},
      {"batch_softmax", {{"global_step", true, true}}},
  };
  return table.at(static_cast<std::size_t>(kind));
}

const char* precision_name(Precision precision) {
  return precision == Precision::kFp32 ? "fp32" : precision == Precision::kFp16 ? "fp16" : "bf16";
}

const char* compressor_name(CompressorKind kind) {
  static constexpr const char* names[] = {"fp32", "fp16", "bf16", "fixed_r8", "one_bit"};
  return names[static_cast<std::size_t>(kind)];
}

std::uint32_t bytes_per_weight(const Segment& segment, Mode mode) {
  if (mode == Mode::kTraining) return segment.precision == Precision::kFp32 ? 4 : 2;
  switch (segment.compressor.kind) {
    case CompressorKind::kFp32: return 4;
    case CompressorKind::kFp16:
    case CompressorKind::kBf16: return 2;
    case CompressorKind::kFixedR8:
    case CompressorKind::kOneBit: return 1;
  }
  throw InvalidArgument("segment.compressor: unknown kind");
}

void require_non_negative(float value, const char* field, std::size_t segment) {
  if (value >= 0 && std::isfinite(value)) return;
  std::ostringstream message;
  message << "segments[" << segment << "]." << field << ": expected a finite number >= 0, got " << value;
  throw InvalidArgument(message.str());
}

void validate(const Segment& segment, std::size_t index) {
  std::ostringstream at;
  at << "segments[" << index << "]";
  if (segment.dim == 0 || segment.dim > kMaxDim) {
    throw InvalidArgument(at.str() + ".dim: expected 1..65536, got " + std::to_string(segment.dim));
  }
  const Optimizer& opt = segment.optimizer;
  if (static_cast<std::size_t>(opt.kind) > static_cast<std::size_t>(OptimizerKind::kBatchSoftmax)) {
    throw InvalidArgument(at.str() + ".optimizer.kind: unknown");
  }
  if (opt.kind == OptimizerKind::kBatchSoftmax && segment.dim != 1) {
    throw InvalidArgument(at.str() + ".dim: batch_softmax keeps one number per id, expected 1, got " +
                          std::to_string(segment.dim));
  }
  require_non_negative(opt.initial_accumulator, "optimizer.initial_accumulator", index);
  require_non_negative(opt.weight_decay, "optimizer.weight_decay", index);
  require_non_negative(opt.epsilon, "optimizer.epsilon", index);
  require_non_negative(opt.momentum, "optimizer.momentum", index);
  require_non_negative(opt.beta1, "optimizer.beta1", index);
  require_non_negative(opt.beta2, "optimizer.beta2", index);
  require_non_negative(opt.l1, "optimizer.l1", index);
  require_non_negative(opt.l2, "optimizer.l2", index);
  require_non_negative(opt.delay_compensation, "optimizer.delay_compensation", index);
  require_non_negative(segment.compressor.range, "compressor.range", index);
  require_non_negative(segment.compressor.amplitude, "compressor.amplitude", index);
  require_non_negative(segment.compressor.init_scale, "compressor.init_scale", index);
  require_non_negative(segment.compressor.max_scale, "compressor.max_scale", index);
  if (segment.compressor.step_size <= 0) {
    throw InvalidArgument(at.str() + ".compressor.step_size: expected > 0, got " +
                          std::to_string(segment.compressor.step_size));
  }
  if (!std::isfinite(segment.initializer.a) || !std::isfinite(segment.initializer.b)) {
    throw InvalidArgument(at.str() + ".initializer: expected finite parameters");
  }
}

}  // namespace

RowLayout::RowLayout(const TableConfig& config) : mode(config.mode) {
  if (config.segments.empty()) throw InvalidArgument("segments: expected at least one, got none");
  if (config.skip_zero_rows && config.mode != Mode::kServing) {
    throw InvalidArgument("skip_zero_rows: needs a serving table, a training row must keep its optimizer state");
  }
  for (std::size_t i = 0; i < config.segments.size(); ++i) {
    const Segment& segment = config.segments[i];
    validate(segment, i);
    const std::uint32_t width = bytes_per_weight(segment, config.mode);
    weight_bytes = (weight_bytes + width - 1) / width * width;  // each weight is aligned to its own size
    SegmentLayout layout{segment, dim, weight_bytes, segment.dim * width, 0, 0, {}};
    dim += segment.dim;
    weight_bytes += layout.weight_bytes;
    if (dim > kMaxDim) throw InvalidArgument("segments: the dims add up to more than 65536");
    segments.push_back(std::move(layout));
  }
  row_bytes = (weight_bytes + 3) / 4 * 4;
  std::uint32_t used = 0;
  for (const SegmentLayout& segment : segments) used += segment.weight_bytes;
  has_gaps = used != row_bytes;
  for (SegmentLayout& segment : segments) {
    segment.state_offset = row_bytes;
    if (config.mode == Mode::kServing) continue;
    for (const SlotShape& shape : info(segment.config.optimizer.kind).slots) {
      const std::uint32_t width = shape.scalar ? 1 : segment.config.dim;
      segment.slots.push_back({shape.name, row_bytes, width, shape.is_int64});
      row_bytes += width * (shape.is_int64 ? 8 : 4);
    }
    segment.state_bytes = row_bytes - segment.state_offset;
  }
}

std::string RowLayout::describe() const {
  std::ostringstream text;
  text << (mode == Mode::kTraining ? "training: " : "serving: ");
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const SegmentLayout& segment = segments[i];
    text << (i == 0 ? "" : " + ") << segment.config.dim << " x " << info(segment.config.optimizer.kind).name << "/"
         << precision_name(segment.config.precision) << "/" << compressor_name(segment.config.compressor.kind) << " ("
         << segment.weight_bytes << "+" << segment.state_bytes << " bytes)";
  }
  return text.str();
}

}  // namespace monolith
