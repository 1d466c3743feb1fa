// Danger: a program comes from a file that may be forged, and sizes, strides and offsets near 2^64 wrap around in a check, so that a
// step reads or writes outside of its buffers. Whatever a program is, it is refused when it is made, or it stays inside.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "monolith/dense_executor.h"
#include "monolith/error.h"

namespace {

using namespace monolith;
using Step = DenseExecutor::Step;
using Wide = unsigned __int128;

constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kLargest = 4096, kLongest = 1 << 16;  // of a buffer that is made, and of a step that is run

struct Program {
  std::vector<DenseExecutor::Buffer> buffers;
  std::size_t given, outputs;
  std::vector<Step> steps;
};

// Numbers, numbers, indices; two outputs; two scratch buffers. Every operation with its dimensions and its kinds of operands.
Program valid() {
  return {{{24}, {24}, {6, true}, {24}, {6}, {24}, {24}},
          3,
          2,
          {{DenseOp::kMul, {2, 3, 4}, {{5, 0, {12, 4, 1}}, {0, 0, {12, 4, 1}}, {1, 0, {1, 2, 6}}}},
           {DenseOp::kProduct, {2, 3, 3, 2}, {{6, 0, {9, 3, 1, 0}}, {5, 0, {12, 4, 0, 1}}, {0, 0, {6, 0, 2, 1}}, {1, 0, {0, 0, 1, 0}}}},
           {DenseOp::kSum, {3, 6}, {{4, 0, {0, 1}}, {6, 0, {6, 1}}}},
           {DenseOp::kSelect, {6, 4, 4}, {{3, 0, {4, 1, 0}}, {5, 2, {0, 1, 6}}, {2, 0, {1, 0, 0}}}},
           {DenseOp::kAmax, {6, 4}, {{4, 0, {1, 0}}, {3, 0, {4, 1}}}},
           {DenseOp::kExp, {24}, {{3, 0, {1}}, {5, 0, {1}}}}}};
}

class Damage {
 public:
  explicit Damage(unsigned seed) : random_(seed) {}

  void change(Program& program) {
    Step& step = program.steps[pick(program.steps.size())];
    switch (pick(16)) {
      case 0: step.op = static_cast<DenseOp>(pick(4) == 0 ? pick(256) : pick(28)); break;
      case 1: program.buffers[pick(program.buffers.size())].size = number(); break;
      case 2: program.buffers[pick(program.buffers.size())].is_int64 ^= true; break;
      case 3: (pick(2) == 0 ? program.given : program.outputs) = number(); break;
      case 4: dimension(step); break;
      case 5: resize(step.operands); break;
      case 6: resize(step.shape); break;
      case 7: std::swap(step, program.steps[pick(program.steps.size())]); break;
      default: of_operand(step);
    }
  }

  // Small ones, so that many programs are valid, and those with which a sum or a product wraps around.
  std::size_t number() {
    constexpr std::size_t kHuge[] = {kMost, kMost / 2 + 1, kMost / 3 + 1, kMost / 8 + 1, kMost - 11, std::size_t{1} << 32};
    switch (pick(4)) {
      case 0: return kHuge[pick(std::size(kHuge))] + pick(3) - 1;
      case 1: return pick(30);
      default: return pick(5);
    }
  }

  std::size_t pick(std::size_t n) { return random_() % n; }

 private:
  template <typename T>
  void resize(std::vector<T>& list) {
    if (pick(2) == 0) {
      list.push_back(list.empty() ? T{} : list.back());
    } else if (!list.empty()) {
      list.pop_back();
    }
  }

  // One more, one less or another one, for all operands alike.
  void dimension(Step& step) {
    const std::size_t d = pick(step.shape.size() + 1), kind = pick(3);
    if (kind != 0 && d == step.shape.size()) return;
    if (kind == 2) step.shape[d] = number();
    const auto change = [&](std::vector<std::size_t>& list, std::size_t with) {
      if (d > list.size()) return;
      const auto at = list.begin() + static_cast<std::ptrdiff_t>(d);
      if (kind == 0) list.insert(at, with);
      if (kind == 1 && at != list.end()) list.erase(at);
    };
    change(step.shape, pick(3) == 0 ? number() : 1);
    for (DenseExecutor::Operand& operand : step.operands) change(operand.strides, number());
  }

  void of_operand(Step& step) {
    if (step.operands.empty()) return;
    DenseExecutor::Operand& operand = step.operands[pick(step.operands.size())];
    switch (pick(4)) {
      case 0: operand.buffer = pick(9) == 0 ? number() : pick(8); break;
      case 1: operand.offset = number(); break;
      case 2: resize(operand.strides); break;
      default: if (!operand.strides.empty()) operand.strides[pick(operand.strides.size())] = number();
    }
  }

  std::mt19937 random_;
};

Wide elements_of(const Step& step) {
  Wide elements = 1;
  for (const std::size_t size : step.shape) elements *= size;
  return elements;
}

// Scratch buffers are one allocation, in which the sanitizer does not see where one of them ends.
bool fits(const Program& program) {
  return std::ranges::all_of(program.steps, [&](const Step& step) {
    return elements_of(step) == 0 || std::ranges::all_of(step.operands, [&](const DenseExecutor::Operand& operand) {
      Wide last = operand.offset;
      for (std::size_t d = 0; d < step.shape.size(); ++d) last += Wide{step.shape[d] - 1} * operand.strides[d];
      return last < program.buffers[operand.buffer].size;
    });
  });
}

// Whether it was small enough to run. Each buffer is an allocation of exactly its size.
bool run(const DenseExecutor& executor, const Program& program, Damage& damage) {
  const auto is_long = [](const Step& step) { return elements_of(step) > kLongest; };
  if (std::ranges::any_of(program.steps, is_long)) return false;
  std::vector<std::vector<float>> numbers;
  std::vector<std::vector<std::int64_t>> indices;
  std::vector<void*> buffers;
  for (std::size_t b = 0; b < program.given + program.outputs; ++b) {
    const auto [size, is_int64] = program.buffers[b];
    if (size > kLargest) return false;
    numbers.emplace_back(is_int64 ? 0 : size, 0.5f);
    indices.emplace_back(is_int64 ? size : 0);
    for (std::int64_t& index : indices.back()) index = static_cast<std::int64_t>(damage.pick(40) == 0 ? damage.number() : damage.pick(3));
    buffers.push_back(is_int64 ? static_cast<void*>(indices.back().data()) : numbers.back().data());
  }
  const auto before = indices;
  try {
    executor.run(buffers);
  } catch (const InvalidArgument&) {  // an index
  }
  CHECK(indices == before);
  for (std::size_t b = 0; b < program.given; ++b) {
    CHECK(std::ranges::all_of(numbers[b], [](float x) { return x == 0.5f; }));
  }
  return true;
}

}  // namespace

TEST("damaged programs are refused, or stay inside of their buffers") {
  std::size_t refused = 0, ran = 0;
  std::set<DenseOp> seen;
  for (unsigned seed = 0; seed < 60000; ++seed) {
    Damage damage(seed);
    Program program = valid();
    for (std::size_t changes = damage.pick(4); changes > 0; --changes) damage.change(program);
    try {
      const DenseExecutor executor(program.buffers, program.given, program.outputs, program.steps);
      if (!fits(program)) std::cerr << "seed " << seed << "\n";
      REQUIRE(fits(program));
      if (!run(executor, program, damage)) continue;
      ++ran;
      for (const Step& step : program.steps) seen.insert(step.op);
    } catch (const InvalidArgument&) {
      ++refused;
    }
  }
  // Neither is the rule, or nothing is tried.
  CHECK(refused > 10000 && ran > 10000);
  CHECK_EQ(seen.size(), static_cast<std::size_t>(DenseOp::kSelect) + 1);
}
