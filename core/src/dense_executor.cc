#include "monolith/dense_executor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>

#include "kernels/kernels.h"
#include "monolith/error.h"

namespace monolith {
namespace {

using Compiled = DenseExecutor::Compiled;
using Place = DenseExecutor::Place;
using Operand = DenseExecutor::Operand;
using Step = DenseExecutor::Step;

constexpr std::size_t kMaxOperands = DenseExecutor::kMaxOperands;

[[noreturn]] void refuse(std::size_t step, const std::string& what) {
  throw InvalidArgument("step " + std::to_string(step) + ": " + what);
}

bool is_reduction(DenseOp op) { return op >= DenseOp::kSum && op <= DenseOp::kAmin; }

std::size_t fewest_operands(DenseOp op) {
  return op < DenseOp::kAdd || is_reduction(op) ? 2 : 3;
}

bool is_empty(const Step& step) { return std::ranges::find(step.shape, 0u) != step.shape.end(); }

// One behind the last number that an operand touches. Sizes of buffers are far from the largest number, so saturation is enough.
std::size_t extent(const Step& step, const Operand& operand) {
  unsigned __int128 last = operand.offset;
  for (std::size_t d = 0; d < step.shape.size(); ++d) {
    last += static_cast<unsigned __int128>(step.shape[d] - 1) * operand.strides[d];
    if (last >= SIZE_MAX) return SIZE_MAX;
  }
  return static_cast<std::size_t>(last) + 1;
}

void check_step(std::size_t number, const Step& step, const std::vector<DenseExecutor::Buffer>& buffers, std::size_t given) {
  if (step.op > DenseOp::kSelect) refuse(number, "there is no such operation");
  if (step.shape.size() > DenseExecutor::kMaxDims) refuse(number, "expected at most 8 dimensions");
  const std::size_t count = step.operands.size(), fewest = fewest_operands(step.op);
  if (count != fewest && !(step.op == DenseOp::kProduct && count == fewest + 1)) refuse(number, "unexpected number of operands");
  unsigned __int128 elements = 1;
  for (const std::size_t size : step.shape) {
    elements *= size;
    if (elements > SIZE_MAX / 16) refuse(number, "the shape is too large");
  }
  for (std::size_t o = 0; o < count; ++o) {
    const Operand& operand = step.operands[o];
    if (operand.strides.size() != step.shape.size()) refuse(number, "expected a stride for each dimension");
    if (operand.buffer >= buffers.size()) refuse(number, "there is no such buffer");
    if (buffers[operand.buffer].is_int64 != (step.op == DenseOp::kSelect && o == 2)) refuse(number, "unexpected type of a buffer");
    if (o == 0 && operand.buffer < given) refuse(number, "writes to a buffer that is only read");
    if (!is_empty(step) && extent(step, operand) > buffers[operand.buffer].size) refuse(number, "reaches outside of its buffer");
    if (operand.offset > buffers[operand.buffer].size) refuse(number, "begins outside of its buffer");
  }
  const std::size_t dims = step.shape.size();
  // Along a single number a stride means nothing.
  const auto stride = [&](std::size_t operand, std::size_t back) {
    return step.shape[dims - back] <= 1 ? 0 : step.operands[operand].strides[dims - back];
  };
  if (step.op == DenseOp::kProduct) {
    if (dims < 3) refuse(number, "expected m, n and k");
    if (stride(0, 1) != 0 || stride(1, 2) != 0 || stride(2, 3) != 0 || (count == 4 && stride(3, 1) != 0)) {
      refuse(number, "unexpected strides of a product");
    }
  } else if (step.op == DenseOp::kSelect) {
    if (dims < 1) refuse(number, "expected the dimension that is selected from");
    if (stride(0, 1) != 0 || stride(2, 1) != 0) refuse(number, "unexpected strides of a selection");
  }
}

// Appends dimension d of a step, to the one before it where all operands allow that.
void append(Compiled& to, const Step& step, std::size_t d, std::size_t first) {
  if (step.shape[d] == 1) return;
  bool follows = to.dims > first;
  for (std::size_t o = 0; follows && o < to.operands; ++o) {
    follows = to.places[o].strides[to.dims - 1] == step.operands[o].strides[d] * step.shape[d];
  }
  if (!follows) to.shape[to.dims++] = 1;
  to.shape[to.dims - 1] *= step.shape[d];
  for (std::size_t o = 0; o < to.operands; ++o) to.places[o].strides[to.dims - 1] = step.operands[o].strides[d];
}

// A dimension of its own, even of size 1.
void append_whole(Compiled& to, const Step& step, std::size_t d) {
  to.shape[to.dims] = step.shape[d];
  for (std::size_t o = 0; o < to.operands; ++o) to.places[o].strides[to.dims] = step.operands[o].strides[d];
  ++to.dims;
}

void append_one(Compiled& to) {
  to.shape[to.dims] = 1;
  for (std::size_t o = 0; o < to.operands; ++o) to.places[o].strides[to.dims] = 0;
  ++to.dims;
}

Compiled compile(const Step& step) {
  Compiled to{};
  to.op = step.op;
  to.operands = step.operands.size();
  const std::size_t dims = step.shape.size();
  if (step.op == DenseOp::kProduct) {
    // Batches and rows are one dimension where they can be, as in a linear layer behind three dimensions.
    for (std::size_t d = 0; d + 2 < dims; ++d) append(to, step, d, 0);
    if (to.dims == 0 || to.places[2].strides[to.dims - 1] != 0) append_one(to);
    append_whole(to, step, dims - 2);
    append_whole(to, step, dims - 1);
  } else if (step.op == DenseOp::kSelect) {
    for (std::size_t d = 0; d + 1 < dims; ++d) append(to, step, d, 0);
    append_whole(to, step, dims - 1);
  } else if (is_reduction(step.op)) {
    for (std::size_t d = 0; d < dims; ++d) {
      if (step.operands[0].strides[d] != 0) append(to, step, d, 0);
    }
    const std::size_t first = to.dims;
    for (std::size_t d = 0; d < dims; ++d) {
      if (step.operands[0].strides[d] == 0) append(to, step, d, first);
    }
  } else {
    for (std::size_t d = 0; d < dims; ++d) append(to, step, d, 0);
  }
  return to;
}

// Scratch buffers that live at the same time lie next to each other, others in the same memory.
class Scratch {
 public:
  // Returns where a buffer of `size` is, which steps up to `last` use.
  std::size_t place(std::size_t size, std::size_t step, std::size_t last) {
    if (size > DenseExecutor::kMaxScratch) refuse(step, "takes too much scratch memory");
    std::erase_if(live_, [&](const Live& other) { return other.last < step; });
    std::size_t begin = 0;
    auto next = live_.begin();
    for (; next != live_.end() && next->begin - begin < size; ++next) begin = next->end;
    // In whole cache lines.
    const std::size_t end = begin + (size + 15) / 16 * 16;
    if (end > DenseExecutor::kMaxScratch) refuse(step, "takes too much scratch memory");
    live_.insert(next, {begin, end, last});
    size_ = std::max(size_, end);
    return begin;
  }

  std::size_t size() const { return size_; }

 private:
  struct Live {
    std::size_t begin, end, last;
  };
  std::vector<Live> live_;  // by position
  std::size_t size_ = 0;
};

// Pointers to the first element of each operand.
struct Pointers {
  std::array<float*, kMaxOperands> at;
};

// Calls body(pointers) for all positions in dimensions `first` up to `last`.
template <typename Body>
void for_each(const Compiled& step, std::size_t first, std::size_t last, Pointers pointers, const Body& body) {
  std::array<std::size_t, DenseExecutor::kMaxDims> index{};
  for (;;) {
    body(pointers);
    std::size_t d = last;
    for (;;) {
      if (d == first) return;
      --d;
      for (std::size_t o = 0; o < step.operands; ++o) pointers.at[o] += step.places[o].strides[d];
      if (++index[d] < step.shape[d]) break;
      for (std::size_t o = 0; o < step.operands; ++o) pointers.at[o] -= step.places[o].strides[d] * step.shape[d];
      index[d] = 0;
    }
  }
}

struct Inner {
  std::size_t n, out, a, b;
};

Inner inner_of(const Compiled& step) {
  if (step.dims == 0) return {1, 0, 0, 0};
  const std::size_t d = step.dims - 1;
  return {step.shape[d], step.places[0].strides[d], step.places[1].strides[d], step.operands > 2 ? step.places[2].strides[d] : 0};
}

template <typename F>
void map_one(const Compiled& step, const Pointers& pointers, const F& f) {
  const Inner in = inner_of(step);
  for_each(step, 0, step.dims == 0 ? 0 : step.dims - 1, pointers, [&](const Pointers& p) {
    float* const out = p.at[0];
    const float* const x = p.at[1];
    if (in.out == 1 && in.a == 1) {
      for (std::size_t i = 0; i < in.n; ++i) out[i] = f(x[i]);
    } else {
      for (std::size_t i = 0; i < in.n; ++i) out[i * in.out] = f(x[i * in.a]);
    }
  });
}

template <typename F>
void map_two(const Compiled& step, const Pointers& pointers, const F& f) {
  const Inner in = inner_of(step);
  for_each(step, 0, step.dims == 0 ? 0 : step.dims - 1, pointers, [&](const Pointers& p) {
    float* const out = p.at[0];
    const float *const x = p.at[1], *const y = p.at[2];
    if (in.out == 1 && in.a == 1 && in.b == 1) {
      for (std::size_t i = 0; i < in.n; ++i) out[i] = f(x[i], y[i]);
    } else if (in.out == 1 && in.a == 1 && in.b == 0) {
      const float same = *y;
      for (std::size_t i = 0; i < in.n; ++i) out[i] = f(x[i], same);
    } else {
      for (std::size_t i = 0; i < in.n; ++i) out[i * in.out] = f(x[i * in.a], y[i * in.b]);
    }
  });
}

template <typename F>
void reduce(const Compiled& step, const Pointers& pointers, const F& f) {
  std::size_t first = 0;  // of the dimensions that are reduced
  while (first < step.dims && step.places[0].strides[first] != 0) ++first;
  const bool by_row = first != 0 && step.places[0].strides[first - 1] == 1 && step.places[1].strides[first - 1] == 1;
  if (by_row) {
    // Whole rows at a time: the sum of vectors.
    const std::size_t n = step.shape[first - 1];
    for_each(step, 0, first - 1, pointers, [&](const Pointers& row) {
      bool is_first = true;
      for_each(step, first, step.dims, row, [&](const Pointers& p) {
        float* const out = p.at[0];
        const float* const x = p.at[1];
        if (is_first) {
          std::memmove(out, x, n * sizeof(float));  // a step may write where it reads
          is_first = false;
        } else {
          for (std::size_t i = 0; i < n; ++i) out[i] = f(out[i], x[i]);
        }
      });
    });
    return;
  }
  const std::size_t last = first == step.dims ? first : step.dims - 1;
  const std::size_t n = last < step.dims ? step.shape[last] : 1;
  const std::size_t stride = last < step.dims ? step.places[1].strides[last] : 0;
  for_each(step, 0, first, pointers, [&](const Pointers& p) {
    float result = 0;
    bool is_first = true;
    for_each(step, first, last, p, [&](const Pointers& part) {
      const float* const x = part.at[1];
      float found;
      if (n >= 16 && stride == 1) {
        // Eight running results, so that none waits for the one before, and a long sum loses less.
        float lanes[8];
        std::memcpy(lanes, x, sizeof(lanes));
        std::size_t i = 8;
        for (; i + 8 <= n; i += 8) {
          for (std::size_t lane = 0; lane < 8; ++lane) lanes[lane] = f(lanes[lane], x[i + lane]);
        }
        for (std::size_t lane = 0; i < n; ++i, ++lane) lanes[lane] = f(lanes[lane], x[i]);
        found = f(f(f(lanes[0], lanes[4]), f(lanes[2], lanes[6])), f(f(lanes[1], lanes[5]), f(lanes[3], lanes[7])));
      } else {
        found = *x;
        for (std::size_t i = 1; i < n; ++i) found = f(found, x[i * stride]);
      }
      result = is_first ? found : f(result, found);
      is_first = false;
    });
    *p.at[0] = result;
  });
}

void product(const Compiled& step, const Pointers& pointers) {
  const std::size_t k = step.dims - 1, n = step.dims - 2, m = step.dims - 3;
  MatrixProduct p{};
  p.m = step.shape[m], p.n = step.shape[n], p.k = step.shape[k];
  p.a_row = step.places[1].strides[m], p.a_k = p.k == 1 ? 1 : step.places[1].strides[k];
  p.b_column = step.places[2].strides[n], p.b_k = p.k == 1 ? 1 : step.places[2].strides[k];
  p.bias_row = step.places[3].strides[m], p.bias_column = step.places[3].strides[n];
  p.out_row = step.places[0].strides[m], p.out_column = step.places[0].strides[n];
  const bool by_column = p.b_column == 1 && p.out_column == 1 && p.n > 1;
  for_each(step, 0, m, pointers, [&](const Pointers& at) {
    p.out = at.at[0], p.a = at.at[1], p.b = at.at[2], p.bias = step.operands == 4 ? at.at[3] : nullptr;
    if (p.a_k == 1 && p.b_k == 1) {
      kernels().dot_product(p);
    } else if (by_column) {
      kernels().column_product(p);
    } else {
      for (std::size_t i = 0; i < p.m; ++i) {
        for (std::size_t j = 0; j < p.n; ++j) {
          float sum = 0;
          for (std::size_t d = 0; d < p.k; ++d) sum += p.a[i * p.a_row + d * p.a_k] * p.b[j * p.b_column + d * p.b_k];
          p.out[i * p.out_row + j * p.out_column] = p.bias == nullptr ? sum : sum + p.bias[i * p.bias_row + j * p.bias_column];
        }
      }
    }
  });
}

void select(const Compiled& step, const Pointers& pointers, const std::int64_t* indices) {
  const std::size_t last = step.dims - 1, inner = last == 0 ? 0 : last - 1;
  const std::size_t size = step.shape[last], stride = step.places[1].strides[last];
  const std::size_t n = last == 0 ? 1 : step.shape[inner];
  const auto inner_stride = [&](std::size_t operand) { return last == 0 ? 0 : step.places[operand].strides[inner]; };
  const std::size_t out = inner_stride(0), source = inner_stride(1), next = inner_stride(2);
  // Positions of indices, which are wider than the floats that pointers count, are those from an address that is not read.
  const float* const begin = pointers.at[2];
  for_each(step, 0, inner, pointers, [&](const Pointers& p) {
    const std::int64_t* const index = indices + (p.at[2] - begin);
    for (std::size_t i = 0; i < n; ++i) {
      const std::int64_t chosen = index[i * next];
      if (chosen < 0 || static_cast<std::size_t>(chosen) >= size) {
        throw InvalidArgument("index " + std::to_string(chosen) + " is out of range for " + std::to_string(size));
      }
      p.at[0][i * out] = p.at[1][i * source + static_cast<std::size_t>(chosen) * stride];
    }
  });
}

// max and min in which NaN wins.
float larger(float a, float b) { return a > b || a != a ? a : b; }
float smaller(float a, float b) { return a < b || a != a ? a : b; }

void run_step(const Compiled& step, const Pointers& p) {
  switch (step.op) {
    case DenseOp::kCopy: return map_one(step, p, [](float x) { return x; });
    case DenseOp::kNeg: return map_one(step, p, [](float x) { return -x; });
    case DenseOp::kAbs: return map_one(step, p, [](float x) { return std::fabs(x); });
    case DenseOp::kRelu: return map_one(step, p, [](float x) { return x < 0 ? 0.0f : x; });
    case DenseOp::kSigmoid: return map_one(step, p, [](float x) { return 1 / (1 + std::exp(-x)); });
    case DenseOp::kTanh: return map_one(step, p, [](float x) { return std::tanh(x); });
    case DenseOp::kExp: return map_one(step, p, [](float x) { return std::exp(x); });
    case DenseOp::kLog: return map_one(step, p, [](float x) { return std::log(x); });
    case DenseOp::kLog1p: return map_one(step, p, [](float x) { return std::log1p(x); });
    case DenseOp::kSqrt: return map_one(step, p, [](float x) { return std::sqrt(x); });
    case DenseOp::kRsqrt: return map_one(step, p, [](float x) { return 1 / std::sqrt(x); });
    case DenseOp::kReciprocal: return map_one(step, p, [](float x) { return 1 / x; });
    case DenseOp::kErf: return map_one(step, p, [](float x) { return std::erf(x); });
    case DenseOp::kSquare: return map_one(step, p, [](float x) { return x * x; });
    case DenseOp::kCos: return map_one(step, p, [](float x) { return std::cos(x); });
    case DenseOp::kSin: return map_one(step, p, [](float x) { return std::sin(x); });
    case DenseOp::kAdd: return map_two(step, p, [](float x, float y) { return x + y; });
    case DenseOp::kSub: return map_two(step, p, [](float x, float y) { return x - y; });
    case DenseOp::kMul: return map_two(step, p, [](float x, float y) { return x * y; });
    case DenseOp::kDiv: return map_two(step, p, [](float x, float y) { return x / y; });
    case DenseOp::kPow: return map_two(step, p, [](float x, float y) { return std::pow(x, y); });
    case DenseOp::kMax: return map_two(step, p, larger);
    case DenseOp::kMin: return map_two(step, p, smaller);
    case DenseOp::kSum: return reduce(step, p, [](float x, float y) { return x + y; });
    case DenseOp::kAmax: return reduce(step, p, larger);
    case DenseOp::kAmin: return reduce(step, p, smaller);
    case DenseOp::kProduct: return product(step, p);
    case DenseOp::kSelect: return;  // needs its indices
  }
}

}  // namespace

DenseExecutor::DenseExecutor(const std::vector<Buffer>& buffers, std::size_t given, std::size_t outputs,
                             const std::vector<Step>& steps)
    : num_buffers_(given + outputs) {
  if (given > buffers.size() || outputs > buffers.size() - given) throw InvalidArgument("expected a buffer for each input and output");
  if (steps.size() > kMaxSteps) throw InvalidArgument("expected at most " + std::to_string(kMaxSteps) + " steps");
  for (std::size_t b = given; b < buffers.size(); ++b) {
    if (buffers[b].is_int64) throw InvalidArgument("buffer " + std::to_string(b) + ": only what is given may be int64");
  }
  std::vector<std::size_t> last_use(buffers.size(), 0);
  for (std::size_t s = 0; s < steps.size(); ++s) {
    check_step(s, steps[s], buffers, given);
    for (const Operand& operand : steps[s].operands) last_use[operand.buffer] = s;
  }
  constexpr std::size_t kNowhere = SIZE_MAX;
  std::vector<std::size_t> begins(buffers.size(), kNowhere);
  Scratch scratch;
  steps_.reserve(steps.size());
  for (std::size_t s = 0; s < steps.size(); ++s) {
    if (is_empty(steps[s])) continue;
    Compiled compiled = compile(steps[s]);
    for (std::size_t o = 0; o < compiled.operands; ++o) {
      const Operand& operand = steps[s].operands[o];
      Place& place = compiled.places[o];
      place.buffer = std::min(operand.buffer, num_buffers_);
      place.offset = operand.offset;
      if (operand.buffer < num_buffers_) continue;
      std::size_t& begin = begins[operand.buffer];
      if (begin == kNowhere) {
        // Otherwise a step would show what another run has left there.
        if (o != 0) refuse(s, "reads scratch memory that no step has written");
        begin = scratch.place(buffers[operand.buffer].size, s, last_use[operand.buffer]);
      }
      place.offset += begin;
    }
    steps_.push_back(compiled);
  }
  scratch_ = scratch.size();
}

void DenseExecutor::run(std::span<void* const> buffers) const {
  if (buffers.size() != num_buffers_) throw InvalidArgument("expected " + std::to_string(num_buffers_) + " buffers, got " + std::to_string(buffers.size()));
  // Kept, because memory of this size may come from the kernel in pages of zeros each time.
  static thread_local std::unique_ptr<float[]> scratch;
  static thread_local std::size_t scratch_size = 0;
  if (scratch_size < scratch_) {
    scratch = std::make_unique_for_overwrite<float[]>(scratch_);
    scratch_size = scratch_;
  }
  for (const Compiled& step : steps_) {
    Pointers pointers{};
    for (std::size_t o = 0; o < step.operands; ++o) {
      const Place& place = step.places[o];
      pointers.at[o] = (place.buffer == num_buffers_ ? scratch.get() : static_cast<float*>(buffers[place.buffer])) + place.offset;
    }
    if (step.op == DenseOp::kSelect) {
      select(step, pointers, static_cast<const std::int64_t*>(buffers[step.places[2].buffer]) + step.places[2].offset);
    } else {
      run_step(step, pointers);
    }
  }
}

}  // namespace monolith
