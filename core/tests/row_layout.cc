// Where weights and optimizer state lie in a row is written into files and decides which tables can exchange rows. A layout
// that moved by four bytes would read an accumulator as a weight.
#include "layout.h"

#include <string>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using namespace monolith;

Segment segment(std::uint32_t dim, OptimizerKind kind = OptimizerKind::kSgd, Precision precision = Precision::kFp32) {
  Segment segment;
  segment.dim = dim;
  segment.optimizer.kind = kind;
  segment.precision = precision;
  return segment;
}

TableConfig with(std::vector<Segment> segments, Mode mode = Mode::kTraining) {
  TableConfig config;
  config.segments = std::move(segments);
  config.mode = mode;
  return config;
}

std::string refusal(const TableConfig& config) {
  try {
    const RowLayout layout(config);
    return "";
  } catch (const InvalidArgument& error) {
    return error.what();
  }
}

struct Expected {
  OptimizerKind kind;
  std::uint32_t state_floats;  // with a dim of 3; int64 counts twice
  std::vector<std::string> slots;
};

}  // namespace

TEST("weights of all segments come first, then the state of each") {
  const RowLayout layout(with({segment(3, OptimizerKind::kAdagrad), segment(2, OptimizerKind::kRowwiseAdagrad), segment(1)}));
  CHECK_EQ(layout.dim, 6u);
  CHECK_EQ(layout.weight_bytes, 24u);
  CHECK_EQ(layout.row_bytes, 24u + 12 + 4);
  CHECK(!layout.has_gaps);
  const std::uint32_t values[] = {0, 3, 5}, weights[] = {0, 12, 20}, states[] = {24, 36, 40}, state_bytes[] = {12, 4, 0};
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK_EQ(layout.segments[i].value_offset, values[i]);
    CHECK_EQ(layout.segments[i].weight_offset, weights[i]);
    CHECK_EQ(layout.segments[i].state_offset, states[i]);
    CHECK_EQ(layout.segments[i].state_bytes, state_bytes[i]);
  }
}

TEST("every optimizer has its slots, in their order") {
  const std::vector<Expected> all = {{OptimizerKind::kSgd, 0, {}},
                                     {OptimizerKind::kMomentum, 3, {"n"}},
                                     {OptimizerKind::kAdagrad, 3, {"norm"}},
                                     {OptimizerKind::kDynamicWdAdagrad, 3, {"norm"}},
                                     {OptimizerKind::kRowwiseAdagrad, 1, {"norm"}},
                                     {OptimizerKind::kAdadelta, 6, {"accum", "accum_update"}},
                                     {OptimizerKind::kAdam, 8, {"m", "v", "beta1_power", "beta2_power"}},
                                     {OptimizerKind::kAmsgrad, 11, {"m", "v", "vhat", "beta1_power", "beta2_power"}},
                                     {OptimizerKind::kAdamom, 7, {"m", "v", "c"}},
                                     {OptimizerKind::kRmsprop, 3, {"n"}},
                                     {OptimizerKind::kRmspropV2, 3, {"n"}},
                                     {OptimizerKind::kFtrl, 6, {"zero", "norm"}},
                                     {OptimizerKind::kGroupFtrl, 6, {"zero", "norm"}},
                                     {OptimizerKind::kGroupAdagrad, 1, {"grad_square_sum"}},
                                     {OptimizerKind::kMovingAverage, 0, {}}};
  for (const Expected& expected : all) {
    const RowLayout layout(with({segment(3, expected.kind)}));
    CHECK_EQ(layout.row_bytes, 12 + 4 * expected.state_floats);
    REQUIRE(layout.segments[0].slots.size() == expected.slots.size());
    std::uint32_t offset = 12;
    for (std::size_t i = 0; i < expected.slots.size(); ++i) {
      const Slot& slot = layout.segments[0].slots[i];
      CHECK_EQ(slot.name, expected.slots[i]);
      CHECK_EQ(slot.offset, offset);
      CHECK(!slot.is_int64);
      offset += 4 * slot.width;
    }
    CHECK_EQ(offset, layout.row_bytes);
  }
  const RowLayout softmax(with({segment(1, OptimizerKind::kBatchSoftmax)}));
  CHECK_EQ(softmax.row_bytes, 12u);
  CHECK(softmax.segments[0].slots[0].is_int64);
}

TEST("half precision weights are packed, and state stays aligned to four bytes") {
  const RowLayout odd(with({segment(3, OptimizerKind::kAdagrad, Precision::kFp16)}));
  CHECK_EQ(odd.weight_bytes, 6u);
  CHECK_EQ(odd.segments[0].state_offset, 8u);
  CHECK_EQ(odd.row_bytes, 20u);
  CHECK(odd.has_gaps);
  const RowLayout even(with({segment(4, OptimizerKind::kAdagrad, Precision::kBf16)}));
  CHECK_EQ(even.row_bytes, 24u);
  CHECK(!even.has_gaps);
  // A float behind an odd number of halves starts at its own alignment.
  const RowLayout mixed(with({segment(1, OptimizerKind::kSgd, Precision::kFp16), segment(2)}));
  CHECK_EQ(mixed.segments[1].weight_offset, 4u);
  CHECK_EQ(mixed.row_bytes, 12u);
  CHECK(mixed.has_gaps);
}

TEST("a serving row has no state, and weights as its compressor says") {
  const std::pair<CompressorKind, std::uint32_t> sizes[] = {{CompressorKind::kFp32, 20},
                                                            {CompressorKind::kFp16, 12},
                                                            {CompressorKind::kBf16, 12},
                                                            {CompressorKind::kFixedR8, 8},
                                                            {CompressorKind::kOneBit, 8}};
  for (const auto& [kind, bytes] : sizes) {
    Segment compressed = segment(5, OptimizerKind::kAdam);
    compressed.compressor.kind = kind;
    const RowLayout layout(with({compressed}, Mode::kServing));
    CHECK_EQ(layout.row_bytes, bytes);
    CHECK(layout.segments[0].slots.empty());
  }
}

TEST("a description tells apart what cannot be exchanged, and only that") {
  const auto describe = [](TableConfig config) { return RowLayout(config).describe(); };
  const std::string plain = describe(with({segment(4, OptimizerKind::kAdagrad)}));
  CHECK_EQ(plain, std::string("training: 4 x adagrad/fp32/fp32 (16+16 bytes)"));
  CHECK(describe(with({segment(5, OptimizerKind::kAdagrad)})) != plain);
  CHECK(describe(with({segment(4, OptimizerKind::kMomentum)})) != plain);
  CHECK(describe(with({segment(4, OptimizerKind::kAdagrad, Precision::kFp16)})) != plain);
  CHECK(describe(with({segment(4, OptimizerKind::kAdagrad)}, Mode::kServing)) != plain);
  CHECK(describe(with({segment(2, OptimizerKind::kAdagrad), segment(2, OptimizerKind::kAdagrad)})) != plain);
  // Hyperparameters may change between runs.
  TableConfig other = with({segment(4, OptimizerKind::kAdagrad)});
  other.segments[0].optimizer.initial_accumulator = 3;
  other.segments[0].initializer.a = 1;
  other.seed = 9;
  CHECK_EQ(describe(other), plain);
}

TEST("what no row can be is refused with the segment and the field") {
  CHECK(refusal(with({})).find("segments: expected at least one") == 0);
  CHECK(refusal(with({segment(4), segment(0)})).find("segments[1].dim") == 0);
  CHECK(refusal(with({segment(65537)})).find("segments[0].dim") == 0);
  CHECK(refusal(with({segment(40000), segment(40000)})).find("add up to more") != std::string::npos);
  CHECK_EQ(refusal(with({segment(40000), segment(25536)})), std::string());
  CHECK(refusal(with({segment(2, OptimizerKind::kBatchSoftmax)})).find("batch_softmax keeps one number") != std::string::npos);
  TableConfig negative = with({segment(4), segment(4)});
  negative.segments[1].optimizer.l1 = -1;
  CHECK(refusal(negative).find("segments[1].optimizer.l1: expected a finite number >= 0, got -1") == 0);
  negative = with({segment(4)});
  negative.segments[0].compressor.step_size = 0;
  CHECK(refusal(negative).find("segments[0].compressor.step_size") == 0);
  negative = with({segment(4)});
  negative.segments[0].initializer.b = INFINITY;
  CHECK(refusal(negative).find("segments[0].initializer") == 0);
  TableConfig skipping = with({segment(4)});
  skipping.skip_zero_rows = true;
  CHECK(refusal(skipping).find("skip_zero_rows") == 0);
}
