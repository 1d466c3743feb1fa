// A model trained on one machine must load and continue on another with the same bits, so every instruction set must round the
// same way: no contraction, no reassociation, one formula.
#include <cstring>

#include "check.h"
#include "kernels/kernels.h"

namespace {

using namespace monolith;

SegmentPlan plan_for(OptimizerKind kind, Storage storage, ReadPath read_path, std::uint32_t dim) {
  SegmentPlan plan{};
  plan.dim = dim;
  plan.state_offset = dim * 4;
  plan.initializer = {InitializerKind::kUniform, -0.5f, 0.5f};
  plan.optimizer = {kind, 0.1f, 0.01f, 0.01f, 0.9f, 0.8f, 0.99f, 0.001f, 0.002f, true, false, 0};
  plan.storage = storage;
  plan.read_path = read_path;
  plan.stochastic_rounding = storage != Storage::kFp32;
  plan.has_state = true;
  plan.quantum = 1.0f / 128;
  plan.amplitude = 0.05f;
  return plan;
}

std::vector<std::byte> train(const Kernels& kernels, const SegmentPlan& plan) {
  std::vector<std::byte> row(plan.dim * 4 * 5 + 16);
  kernels.initialize(plan, 0x1234567890ABCDEFull, row.data());
  std::vector<float> grad(plan.dim);
  std::vector<float> scratch(2 * plan.dim);
  std::byte* rows[] = {row.data()};
  const float* grads[] = {grad.data()};
  for (int step = 1; step <= 20; ++step) {
    for (std::uint32_t i = 0; i < plan.dim; ++i) grad[i] = 0.3f * static_cast<float>(step % 5) - 0.1f * static_cast<float>(i % 7);
    const std::uint64_t keys[] = {hash_id(step)};
    kernels.step(plan, {0.05f, 1.5f, step, scratch.data()}, rows, grads, nullptr, keys, 1);
  }
  return row;
}

}  // namespace

TEST("every instruction set trains to the same bits") {
  const auto& sets = all_kernels();
  for (int kind = 0; kind <= static_cast<int>(OptimizerKind::kBatchSoftmax); ++kind) {
    for (const Storage storage : {Storage::kFp32, Storage::kFp16, Storage::kBf16}) {
      for (const ReadPath path : {ReadPath::kRaw, ReadPath::kHashNet}) {
        const auto plan = plan_for(static_cast<OptimizerKind>(kind), storage, path,
                                   kind == static_cast<int>(OptimizerKind::kBatchSoftmax) ? 1 : 37);
        const auto expected = train(*sets.front(), plan);
        for (const Kernels* kernels : sets) CHECK(train(*kernels, plan) == expected);
      }
    }
  }
}

TEST("half precision round trips every finite value, and rounds to the nearest") {
  for (const Kernels* kernels : all_kernels()) {
    SegmentPlan plan = plan_for(OptimizerKind::kSgd, Storage::kFp16, ReadPath::kRaw, 1);
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      if ((half & 0x7C00) == 0x7C00) continue;
      float value;
      std::uint16_t back;
      kernels->load(plan, reinterpret_cast<const std::byte*>(&half), &value);
      kernels->store(plan, &value, reinterpret_cast<std::byte*>(&back));
      REQUIRE(back == half);
      // A third of the way to the next half rounds back, two thirds round on.
      const auto next = static_cast<std::uint16_t>(half + 1);
      if ((next & 0x7C00) == 0x7C00) continue;
      float above;
      kernels->load(plan, reinterpret_cast<const std::byte*>(&next), &above);
      const float near = value + (above - value) / 3;
      const float far = value + (above - value) * 2 / 3;
      kernels->store(plan, &near, reinterpret_cast<std::byte*>(&back));
      REQUIRE(back == half);
      kernels->store(plan, &far, reinterpret_cast<std::byte*>(&back));
      REQUIRE(back == next);
    }
  }
}

TEST("the normal quantile is exact at known points") {
  CHECK_NEAR(normal_quantile(0.5), 0, 1e-15);
  CHECK_NEAR(normal_quantile(0.975), 1.959963984540054, 1e-13);
  CHECK_NEAR(normal_quantile(0.022750131948179209), -2, 1e-13);
  CHECK_NEAR(normal_quantile(1e-9), -5.997807015007687, 1e-11);
}
