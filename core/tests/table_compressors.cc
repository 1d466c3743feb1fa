// Rows that are stored narrower than they are trained or read: half precision, and the quantised serving formats. A table that
// rounded twice, or read what it does not store, would serve another model than was evaluated.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::Compressor;
using monolith::CompressorKind;
using monolith::Mode;
using monolith::Precision;
using monolith::Table;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

monolith::TableConfig config(Mode mode, CompressorKind kind, Precision precision = Precision::kFp32) {
  auto config = tables::config(monolith::OptimizerKind::kSgd, 4);
  config.mode = mode;
  config.segments[0].compressor.kind = kind;
  config.segments[0].precision = precision;
  return config;
}

Floats stored(Table& table, const Floats& values) {
  table.assign(Ids{1}, values.data(), 0);
  Floats out(4);
  table.lookup(Ids{1}, out.data());
  return out;
}

}  // namespace

TEST("half precision rows hold the nearest number they can") {
  for (const Precision precision : {Precision::kFp16, Precision::kBf16}) {
    Table table(config(Mode::kTraining, CompressorKind::kFp32, precision));
    const Floats values = {0.1f, -3.14159f, 1000.25f, 0};
    const Floats out = stored(table, values);
    const float relative = precision == Precision::kFp16 ? 0x1p-11f : 0x1p-8f;
    for (int i = 0; i < 4; ++i) CHECK(std::abs(out[i] - values[i]) <= relative * std::abs(values[i]));
    CHECK(stored(table, out) == out);  // what is read can be written back
  }
}

TEST("training in half precision rounds once a step") {
  Table table(config(Mode::kTraining, CompressorKind::kFp32, Precision::kBf16));
  stored(table, {1, 1, 1, 1});
  const float rate = 1;
  const Floats tiny(4, -0x1p-10f);  // a quarter of the distance to the next number
  for (int i = 0; i < 8; ++i) table.apply_gradients(Ids{1}, tiny.data(), tables::options(rate));
  Floats out(4);
  table.lookup(Ids{1}, out.data());
  for (const float x : out) CHECK_EQ(x, 1.0f);
}

TEST("stochastic rounding lets small steps through on average, and the same data gives the same bits") {
  auto made = config(Mode::kTraining, CompressorKind::kFp32, Precision::kBf16);
  made.segments[0].stochastic_rounding = true;
  Table first(made), second(made);
  Ids ids;
  for (std::int64_t id = 0; id < 500; ++id) ids.push_back(id);
  const Floats ones(500 * 4, 1.0f), tiny(500 * 4, -0x1p-10f);
  const float rate = 1;
  Floats out(500 * 4), again(500 * 4);
  for (Table* table : {&first, &second}) {
    table->assign(ids, ones.data(), 0);
    for (int i = 0; i < 8; ++i) table->apply_gradients(ids, tiny.data(), tables::options(rate));
  }
  first.lookup(ids, out.data());
  second.lookup(ids, again.data());
  CHECK(out == again);
  double mean = 0;
  for (const float x : out) mean += x / 2000.0;
  CHECK_NEAR(mean, 1 + 8 * 0x1p-10, 0.0008);
}

TEST("serving rows hold what their compressor can") {
  const Floats values = {0.3f, -0.7f, 5.0f, 0.0f};
  Table fixed(config(Mode::kServing, CompressorKind::kFixedR8));  // range 1: steps of 1/128, ends saturate
  Floats out = stored(fixed, values);
  CHECK_NEAR(out[0], 0.3f, 1.0 / 256 + 1e-6);
  CHECK_NEAR(out[1], -0.7f, 1.0 / 256 + 1e-6);
  CHECK_NEAR(out[2], 127.0 / 128, 1e-6);
  CHECK_EQ(out[3], 0.0f);
  Table bits(config(Mode::kServing, CompressorKind::kOneBit));
  out = stored(bits, values);
  CHECK_NEAR(out[0], 0.05f, 1e-7);
  CHECK_NEAR(out[1], -0.05f, 1e-7);
  CHECK_NEAR(out[2], 0.05f, 1e-7);
  CHECK_NEAR(out[3], -0.05f, 1e-7);  // not above zero
}

TEST("a training table reads what serving will, and trains what it stores") {
  Table table(config(Mode::kTraining, CompressorKind::kFixedR8));
  const Floats out = stored(table, {0.3f, -0.7f, 5.0f, 0.001f});
  CHECK_NEAR(out[2], 127.0 / 128, 1e-6);
  CHECK_EQ(out[3], 0.0f);
  const float rate = 1;
  for (int i = 0; i < 3; ++i) table.apply_gradients(Ids{1}, Floats{0, 0, 0, -0.001f}.data(), tables::options(rate));
  Floats again(4);
  table.lookup(Ids{1}, again.data());
  CHECK_NEAR(again[3], 1.0 / 128, 1e-6);  // 0.004 in full precision, not four times 0
}

TEST("a one-bit table in training reads a slope that hardens with the steps") {
  auto made = config(Mode::kTraining, CompressorKind::kOneBit);
  made.segments[0].compressor.step_size = 10;
  made.segments[0].compressor.max_scale = 3;
  Table table(made);
  const Floats values = {0.5f, -0.5f, 0, 2};
  const Floats soft = stored(table, values);
  for (int i = 0; i < 4; ++i) CHECK_NEAR(soft[i], 0.05 * std::tanh(values[i]), 1e-6);
  const float rate = 0;
  auto options = tables::options(rate);
  options.step = 1000;  // a multiple of step_size: scale = min(max_scale, init_scale * sqrt(1 + 0.005 * step))
  table.apply_gradients(Ids{1}, Floats(4).data(), options);
  const double scale = std::sqrt(1 + 0.005 * 1000);
  Floats hard(4);
  table.lookup(Ids{1}, hard.data());
  for (int i = 0; i < 4; ++i) CHECK_NEAR(hard[i], 0.05 * std::tanh(scale * values[i]), 1e-6);
  CHECK_NEAR(table.state().hashnet_scales[0], scale, 1e-5);
  options.step = 1000000;
  table.apply_gradients(Ids{1}, Floats(4).data(), options);
  CHECK_EQ(table.state().hashnet_scales[0], 3.0f);
}

TEST("a serving table takes no gradients") {
  Table table(config(Mode::kServing, CompressorKind::kFp32));
  const float rate = 1;
  CHECK_THROWS(table.apply_gradients(Ids{1}, Floats(4).data(), tables::options(rate)), monolith::InvalidArgument);
  CHECK_THROWS(table.apply_pooled_gradients(Ids{1}, Ids{0, 1}, monolith::Pooling::kSum, Floats(4).data(), tables::options(rate)),
               monolith::InvalidArgument);
  CHECK_EQ(table.size(), 0u);
}
