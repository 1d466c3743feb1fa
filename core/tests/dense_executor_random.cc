// Danger: a program of several steps computes something else than its steps say, because dimensions that are merged, a kernel that is
// chosen by strides, or scratch memory that is shared by two buffers are right for usual shapes only. All numbers are small integers,
// so results are exact in any order of additions and have to be equal.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "monolith/dense_executor.h"

namespace {

using namespace monolith;
using Sizes = std::vector<std::size_t>;
using Operand = DenseExecutor::Operand;
using Step = DenseExecutor::Step;

constexpr DenseOp kMaps[] = {DenseOp::kCopy, DenseOp::kNeg, DenseOp::kAbs, DenseOp::kRelu, DenseOp::kSquare, DenseOp::kAdd,
                             DenseOp::kSub, DenseOp::kMul, DenseOp::kMax, DenseOp::kMin};
constexpr double kMaxExact = 1 << 24;  // of float32
constexpr double kLargestGiven = 4, kUntouched = 3;
constexpr std::size_t kIndices = 2, kGiven = 3;  // buffers 0 and 1 are numbers, then come the indices

// Valid steps at random. Each writes a buffer of its own, every element of it, so all that is read has been written.
class Program {
 public:
  explicit Program(unsigned seed) : random_(seed) {
    const std::size_t count = 1 + pick(12);
    std::vector<bool> is_output(count);
    for (std::size_t s = 0; s < count; ++s) is_output[s] = s + 1 == count || pick(4) == 0;
    outputs = static_cast<std::size_t>(std::ranges::count(is_output, true));
    buffers.resize(kGiven + count);
    bounds_.resize(kGiven + count, kLargestGiven);
    buffers[0].size = 1 + pick(200), buffers[1].size = 200, buffers[kIndices] = {60, true};
    written_ = {0, 1};
    std::size_t output = kGiven, scratch = kGiven + outputs;
    for (std::size_t s = 0; s < count; ++s) add(is_output[s] ? output++ : scratch++);
  }

  std::vector<DenseExecutor::Buffer> buffers;
  std::size_t outputs = 0;
  std::vector<Step> steps;

 private:
  std::size_t pick(std::size_t n) { return random_() % n; }

  Sizes shape(std::size_t fewest_dims) {
    Sizes found(fewest_dims + pick(5 - fewest_dims));
    for (std::size_t& size : found) size = 1 + pick(5);
    if (!found.empty() && pick(2) == 0) found[pick(found.size())] = 6 + pick(70);
    return found;
  }

  // Elements next to each other, the dimensions in any order, and stride 0 along those of `still`.
  Sizes dense_strides(const Sizes& shape, const std::vector<bool>& still) {
    Sizes order(shape.size()), strides(shape.size(), 0);
    std::iota(order.begin(), order.end(), 0u);
    if (pick(2) == 0) {
      std::ranges::reverse(order);
    } else {
      std::ranges::shuffle(order, random_);
    }
    std::size_t next = 1;
    for (const std::size_t d : order) {
      if (!still[d]) strides[d] = next, next *= shape[d];
    }
    return strides;
  }

  static std::size_t reach(const Sizes& shape, const Sizes& strides) {
    std::size_t last = 0;
    for (std::size_t d = 0; d < shape.size(); ++d) last += (shape[d] - 1) * strides[d];
    return last;
  }

  // Any place of a buffer from which the whole shape can be read: next to each other if it fits, broadcast, or along any strides.
  Operand source(std::size_t buffer, const Sizes& shape, std::vector<bool> still) {
    for (std::size_t d = 0; d < shape.size(); ++d) still[d] = still[d] || pick(6) == 0;
    Sizes strides = dense_strides(shape, still);
    const std::size_t size = buffers[buffer].size;
    if (reach(shape, strides) >= size || pick(4) == 0) {
      std::size_t left = size - 1;
      for (std::size_t d = 0; d < shape.size(); ++d) {
        strides[d] = still[d] ? 0 : shape[d] == 1 ? pick(9) : pick(left / (shape[d] - 1) + 1);
        left -= (shape[d] - 1) * strides[d];
      }
    }
    return {buffer, pick(size - reach(shape, strides)), strides};
  }

  void add(std::size_t to) {
    const std::size_t kind = pick(5);
    Step step{DenseOp::kCopy, shape(kind == 0 ? 3 : kind == 1 ? 1 : 0), {}};
    const std::size_t dims = step.shape.size();
    const std::vector<bool> none(dims);
    const auto only = [&](std::size_t back) {
      std::vector<bool> still = none;
      still[dims - back] = true;
      return still;
    };
    const auto any = [&] { return written_[pick(2) == 0 ? written_.size() - 1 : pick(written_.size())]; };
    const std::size_t a = any(), b = any(), c = any();
    double bound = bounds_[a];
    std::vector<bool> still = none;  // of the result
    if (kind == 0) {
      step.op = DenseOp::kProduct, still = only(1);
      bound = bounds_[a] * bounds_[b] * static_cast<double>(step.shape.back()) + bounds_[c];
      step.operands = {{}, source(a, step.shape, only(2)), source(b, step.shape, only(3))};
      if (pick(2) == 0) step.operands.push_back(source(c, step.shape, only(1)));
    } else if (kind == 1) {
      step.op = DenseOp::kSelect, still = only(1);
      step.operands = {{}, source(a, step.shape, none), source(kIndices, step.shape, only(1))};
    } else if (kind == 2) {
      step.op = static_cast<DenseOp>(static_cast<std::size_t>(DenseOp::kSum) + pick(3));
      for (std::size_t d = 0; d < dims; ++d) {
        still[d] = pick(2) == 0;
        if (still[d] && step.op == DenseOp::kSum) bound *= static_cast<double>(step.shape[d]);
      }
      step.operands = {{}, source(a, step.shape, none)};
    } else {
      step.op = kMaps[pick(std::size(kMaps))];
      step.operands = {{}, source(a, step.shape, none)};
      if (step.op >= DenseOp::kAdd) step.operands.push_back(source(b, step.shape, none));
      bound = step.op == DenseOp::kMul ? bound * bounds_[b] : step.op == DenseOp::kSquare ? bound * bound : bound + bounds_[b];
    }
    if (bound > kMaxExact) {
      step.op = DenseOp::kMin, still = none, bound = std::max(bounds_[a], bounds_[b]);
      step.operands = {{}, source(a, step.shape, none), source(b, step.shape, none)};
    }
    // Outputs may have more before the result, which stays as it is.
    const std::size_t gap = to < kGiven + outputs ? pick(3) : 0;
    const Sizes strides = dense_strides(step.shape, still);
    step.operands[0] = {to, gap, strides};
    buffers[to].size = gap + reach(step.shape, strides) + 1;
    bounds_[to] = std::max(bound, kUntouched);
    written_.push_back(to);
    steps.push_back(step);
  }

  std::mt19937 random_;
  Sizes written_;
  std::vector<double> bounds_;  // of the absolute values in a buffer
};

double map(DenseOp op, double x, double y) {
  switch (op) {
    case DenseOp::kNeg: return -x;
    case DenseOp::kAbs: return x < 0 ? -x : x;
    case DenseOp::kRelu: return x < 0 ? 0 : x;
    case DenseOp::kSquare: return x * x;
    case DenseOp::kAdd: case DenseOp::kSum: return x + y;
    case DenseOp::kSub: return x - y;
    case DenseOp::kMul: return x * y;
    case DenseOp::kMax: case DenseOp::kAmax: return std::max(x, y);
    case DenseOp::kMin: case DenseOp::kAmin: return std::min(x, y);
    default: return x;
  }
}

// What a step means: one loop over all positions of its shape. Every buffer has memory of its own.
void interpret(const Step& step, std::vector<std::vector<double>>& memory) {
  const std::size_t dims = step.shape.size(), operands = step.operands.size();
  std::size_t elements = 1;
  for (const std::size_t size : step.shape) elements *= size;
  for (std::size_t element = 0; element < elements; ++element) {
    double* at[DenseExecutor::kMaxOperands] = {};
    for (std::size_t o = 0; o < operands; ++o) at[o] = &memory[step.operands[o].buffer].at(step.operands[o].offset);
    std::size_t rest = element;
    bool is_first = true;  // of those that make one result
    for (std::size_t d = dims; d-- > 0; rest /= step.shape[d]) {
      const std::size_t index = rest % step.shape[d];
      for (std::size_t o = 0; o < operands; ++o) at[o] += index * step.operands[o].strides[d];
      if (step.operands[0].strides[d] == 0 && index != 0) is_first = false;
    }
    if (step.op == DenseOp::kProduct) {
      if (is_first) *at[0] = operands == 4 ? *at[3] : 0;
      *at[0] += *at[1] * *at[2];
    } else if (step.op == DenseOp::kSelect) {
      if (is_first) *at[0] = at[1][static_cast<std::size_t>(*at[2]) * step.operands[1].strides[dims - 1]];
    } else if (step.op >= DenseOp::kSum) {
      *at[0] = is_first ? *at[1] : map(step.op, *at[0], *at[1]);
    } else {
      *at[0] = map(step.op, *at[1], operands == 3 ? *at[2] : 0);
    }
  }
}

}  // namespace

TEST("random programs compute what loops over their steps compute") {
  std::set<DenseOp> seen;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const Program program(seed);
    std::mt19937 random(seed);
    // No index is larger than the smallest dimension that is selected from allows.
    std::size_t smallest = 80;
    for (const Step& step : program.steps) {
      seen.insert(step.op);
      if (step.op == DenseOp::kSelect) smallest = std::min(smallest, step.shape.back());
    }
    std::vector<std::vector<double>> expected;
    for (const DenseExecutor::Buffer& buffer : program.buffers) expected.emplace_back(buffer.size, kUntouched);
    for (std::size_t b = 0; b < kIndices; ++b) {
      for (double& x : expected[b]) x = static_cast<double>(random() % 9) - kLargestGiven;
    }
    for (double& index : expected[kIndices]) index = static_cast<double>(random() % smallest);
    // Memory of exactly the sizes of the buffers lets the address sanitizer see what is read or written outside.
    const std::vector<std::int64_t> indices(expected[kIndices].begin(), expected[kIndices].end());
    std::vector<std::vector<float>> memory;
    std::vector<void*> given;
    for (std::size_t b = 0; b < kGiven + program.outputs; ++b) {
      memory.emplace_back(expected[b].begin(), expected[b].end());
      given.push_back(b == kIndices ? const_cast<std::int64_t*>(indices.data()) : static_cast<void*>(memory.back().data()));
    }
    for (const Step& step : program.steps) interpret(step, expected);
    DenseExecutor(program.buffers, kGiven, program.outputs, program.steps).run(given);
    for (std::size_t b = 0; b < kGiven + program.outputs; ++b) {
      const bool is_equal = std::ranges::equal(memory[b], expected[b]);
      if (!is_equal) std::cerr << "seed " << seed << ", buffer " << b << "\n";
      REQUIRE(is_equal);
    }
  }
  CHECK_EQ(seen.size(), std::size(kMaps) + 5);
}
