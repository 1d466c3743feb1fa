// Where an optimizer would divide by zero or lose track: a NaN in a row stays for ever and spreads to everything that reads it.
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "tables.h"

namespace {

using monolith::OptimizerKind;

constexpr std::uint32_t kDim = 4;

monolith::TableConfig config(OptimizerKind kind, float start = 0.5f) {
  auto config = tables::config(kind, kDim);
  config.segments[0].optimizer = {};
  config.segments[0].optimizer.kind = kind;
  config.segments[0].initializer = {monolith::InitializerKind::kConstant, start, 0};
  return config;
}

std::vector<float> after(monolith::Table& table, const std::vector<float>& grad, float rate = 0.1f, std::int64_t step = 0) {
  const std::int64_t ids[] = {7};
  auto options = tables::options(rate);
  options.step = step;
  table.apply_gradients(ids, grad.data(), options);
  std::vector<float> out(table.dim());
  table.lookup(ids, out.data());
  return out;
}

}  // namespace

TEST("a group optimizer whose row has no direction does not divide by its length") {
  for (const OptimizerKind kind : {OptimizerKind::kGroupFtrl, OptimizerKind::kGroupAdagrad}) {
    auto made = config(kind, 0);
    made.segments[0].optimizer.beta1 = 1;
    monolith::Table table(made);
    for (int i = 0; i < 3; ++i) {
      for (const float w : after(table, std::vector<float>(kDim, 0))) CHECK_EQ(w, 0.0f);
    }
    for (const float w : after(table, std::vector<float>(kDim, 1))) {
      CHECK(std::isfinite(w));
      CHECK(w < 0);
    }
  }
}

TEST("group adagrad without an accumulator keeps its row until the first gradient") {
  monolith::Table table(config(OptimizerKind::kGroupAdagrad));
  for (const float w : after(table, std::vector<float>(kDim, 0))) CHECK_EQ(w, 0.5f);
  for (const float w : after(table, std::vector<float>(kDim, 1))) CHECK_NEAR(w, 0.4f, 1e-6);
}

TEST("group ftrl without an accumulator leaves elements without a gradient at zero") {
  auto made = config(OptimizerKind::kGroupFtrl, 0);
  monolith::Table table(made);
  const auto w = after(table, {1, 0, -1, 0});
  CHECK(w[0] < 0 && w[2] > 0);
  CHECK_EQ(w[1], 0.0f);
  CHECK_EQ(w[3], 0.0f);
}

TEST("adagrad with an accumulator ignores gradients of zero") {
  auto made = config(OptimizerKind::kAdagrad);
  made.segments[0].optimizer.initial_accumulator = 0.1f;
  monolith::Table table(made);
  for (const float w : after(table, std::vector<float>(kDim, 0))) CHECK_EQ(w, 0.5f);
}

TEST("rates that an optimizer divides by must be above zero") {
  const std::int64_t ids[] = {7};
  const std::vector<float> grad(kDim, 1);
  for (const OptimizerKind kind : {OptimizerKind::kFtrl, OptimizerKind::kGroupFtrl, OptimizerKind::kGroupAdagrad}) {
    monolith::Table table(config(kind));
    const float zero = 0;
    CHECK_THROWS(table.apply_gradients(ids, grad.data(), tables::options(zero)), monolith::InvalidArgument);
    CHECK_EQ(table.size(), 0u);
  }
  monolith::Table table(config(OptimizerKind::kSgd));
  for (const float w : after(table, grad, 0)) CHECK_EQ(w, 0.5f);  // a schedule may begin with zero
  for (const float wrong : {-0.1f, std::nanf(""), INFINITY}) {
    CHECK_THROWS(table.apply_gradients(ids, grad.data(), tables::options(wrong)), monolith::InvalidArgument);
  }
}

TEST("batch softmax keeps the step at which its id came last") {
  auto made = config(OptimizerKind::kBatchSoftmax, 0);
  made.segments[0].dim = 1;
  monolith::Table table(made);
  // b = (1 - rate) * b + rate * (step - last step); the first distance is from step 0.
  CHECK_NEAR(after(table, {0}, 0.25f, 8)[0], 2.0f, 1e-6);
  CHECK_NEAR(after(table, {0}, 0.25f, 12)[0], 0.75f * 2 + 0.25f * 4, 1e-6);
  CHECK_NEAR(after(table, {0}, 0.25f, 12)[0], 0.75f * 2.5f, 1e-6);
}

TEST("batch softmax counts steps beyond 32 bits") {
  auto made = config(OptimizerKind::kBatchSoftmax, 0);
  made.segments[0].dim = 1;
  monolith::Table table(made);
  const std::int64_t far = std::int64_t{1} << 40;
  after(table, {0}, 1.0f, far);
  CHECK_EQ(after(table, {0}, 1.0f, far + 3)[0], 3.0f);
}

TEST("a NaN gradient reaches its own row alone") {
  monolith::Table table(config(OptimizerKind::kSgd));
  const std::int64_t ids[] = {1, 2};
  std::vector<float> grads(2 * kDim, 1);
  grads[1] = std::nanf("");
  const float rate = 0.1f;
  table.apply_gradients(ids, grads.data(), tables::options(rate));
  std::vector<float> out(2 * kDim);
  table.lookup(ids, out.data());
  CHECK(std::isnan(out[1]));
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (i != 1) CHECK_NEAR(out[i], 0.4f, 1e-6);
  }
}

TEST("segments of a row have optimizers, rates and gradients of their own") {
  auto made = config(OptimizerKind::kSgd);
  made.segments[0].dim = 3;
  made.segments.push_back(made.segments[0]);
  made.segments[1].dim = 2;
  made.segments[1].optimizer.kind = OptimizerKind::kMovingAverage;
  made.segments[1].optimizer.momentum = 0.5f;
  made.segments.push_back(made.segments[0]);
  made.segments[2].dim = 1;
  monolith::Table table(made);
  const std::int64_t ids[] = {7};
  const std::vector<float> grads = {1, 2, 3, 10, 20, 4};
  const float rates[] = {0.1f, 99, 0.01f};
  monolith::UpdateOptions options;
  options.learning_rates = rates;
  table.apply_gradients(ids, grads.data(), options);
  std::vector<float> out(6);
  table.lookup(ids, out.data());
  const float expected[] = {0.4f, 0.3f, 0.2f, 5.25f, 10.25f, 0.46f};
  for (int i = 0; i < 6; ++i) CHECK_NEAR(out[i], expected[i], 1e-6);
}
