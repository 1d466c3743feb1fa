// Runs the dense part of a model for one set of shapes: steps over float32 in flat buffers, in one call on the calling thread. For
// small requests, whose arithmetic takes less time than a framework needs to get from one operator to the next.
//
// Everything is checked when an executor is made: no step can reach outside of a buffer, whatever the steps are, if buffers have the
// sizes that were given. Only the entries of int64 buffers are checked in every run.
//
// Thread-safety: immutable; any number of threads may run one executor at a time. Each thread keeps scratch memory of the size of the
// largest it has run, at most kMaxScratch.
// Ownership: the caller owns the buffers that it gives, which nothing may change during a run.
// Failure: InvalidArgument for steps that do not fit their buffers, and for an index out of range, after which outputs are unspecified.
// std::bad_alloc for scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace monolith {

// What a step computes for each element of its shape. Operands: the result, then what it is made of. A step whose shape has no elements
// does nothing.
enum class DenseOp : std::uint8_t {
  // One argument.
  kCopy, kNeg, kAbs, kRelu, kSigmoid, kTanh, kExp, kLog, kLog1p, kSqrt, kRsqrt, kReciprocal, kErf, kSquare, kCos, kSin,
  // Two arguments. NaN wins in kMax and kMin.
  kAdd, kSub, kMul, kDiv, kPow, kMax, kMin,
  // One argument: over the dimensions in which the result has stride 0.
  kSum, kAmax, kAmin,
  // Shape [..., m, n, k]: sums a * b over k, in which the result has stride 0. The third argument, if there is one, is added.
  kProduct,
  // A source, and int64 indices that are added to its position, each times the stride of the last dimension, which is the one that is
  // selected from: shape [..., size of that dimension]. The result and the indices have stride 0 there.
  kSelect,
};

class DenseExecutor {
 public:
  struct Buffer {
    std::size_t size;  // numbers
    bool is_int64 = false;
  };
  struct Operand {
    std::size_t buffer;
    std::size_t offset;
    std::vector<std::size_t> strides;  // as many as the shape has dimensions
  };
  struct Step {
    DenseOp op;
    std::vector<std::size_t> shape;
    std::vector<Operand> operands;
  };

  static constexpr std::size_t kMaxDims = 8, kMaxOperands = 4, kMaxSteps = 4096;
  static constexpr std::size_t kMaxScratch = 1 << 18;  // floats

  // Buffers: `given` are read, then come `outputs`, and the others are scratch.
  DenseExecutor(const std::vector<Buffer>& buffers, std::size_t given, std::size_t outputs, const std::vector<Step>& steps);

  // Buffers that the caller has: those given, and the outputs.
  std::size_t num_buffers() const noexcept { return num_buffers_; }

  // `buffers`: where each of them is.
  void run(std::span<void* const> buffers) const;

  // One operand after it is checked. Dimensions of size 1 are gone, and those that follow each other everywhere are one.
  struct Place {
    std::size_t buffer;  // num_buffers(): scratch
    std::size_t offset;
    std::size_t strides[kMaxDims];
  };
  struct Compiled {
    DenseOp op;
    std::size_t dims, operands;
    std::size_t shape[kMaxDims];
    Place places[kMaxOperands];
  };

 private:
  std::size_t num_buffers_;
  std::size_t scratch_ = 0;  // floats
  std::vector<Compiled> steps_;
};

}  // namespace monolith
