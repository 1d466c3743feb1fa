#include "monolith/dense_executor.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <tuple>
#include <vector>

#include "module.h"
#include "monolith/error.h"
#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::DenseExecutor;
using monolith::DenseOp;

namespace {

using Buffer = std::tuple<std::size_t, bool>;
using Operand = std::tuple<std::size_t, std::size_t, std::vector<std::size_t>>;
using Step = std::tuple<DenseOp, std::vector<std::size_t>, std::vector<Operand>>;

void make(DenseExecutor* self, const std::vector<Buffer>& buffers, std::size_t given, std::size_t outputs,
          const std::vector<Step>& steps) {
  std::vector<DenseExecutor::Buffer> sizes;
  for (const auto& [size, is_int64] : buffers) sizes.push_back({size, is_int64});
  std::vector<DenseExecutor::Step> made;
  for (const auto& [op, shape, operands] : steps) {
    made.push_back({op, shape, {}});
    for (const auto& [buffer, offset, strides] : operands) made.back().operands.push_back({buffer, offset, strides});
  }
  new (self) DenseExecutor(sizes, given, outputs, made);
}

void run(const DenseExecutor& self, const nb::list& addresses) {
  // A conversion of each tensor would take longer than the arithmetic.
  std::array<void*, 64> few;
  std::vector<void*> many;
  void** buffers = few.data();
  if (addresses.size() > few.size()) {
    many.resize(addresses.size());
    buffers = many.data();
  }
  for (std::size_t b = 0; b < addresses.size(); ++b) {
    buffers[b] = PyLong_AsVoidPtr(addresses[b].ptr());
    if (buffers[b] == nullptr && PyErr_Occurred() != nullptr) throw nb::python_error();
  }
  const Unlocked unlocked;
  self.run({buffers, addresses.size()});
}

}  // namespace

void init_dense_executor(nb::module_& m) {
  nb::enum_<DenseOp>(m, "DenseOp")
      .value("COPY", DenseOp::kCopy)
      .value("NEG", DenseOp::kNeg)
      .value("ABS", DenseOp::kAbs)
      .value("RELU", DenseOp::kRelu)
      .value("SIGMOID", DenseOp::kSigmoid)
      .value("TANH", DenseOp::kTanh)
      .value("EXP", DenseOp::kExp)
      .value("LOG", DenseOp::kLog)
      .value("LOG1P", DenseOp::kLog1p)
      .value("SQRT", DenseOp::kSqrt)
      .value("RSQRT", DenseOp::kRsqrt)
      .value("RECIPROCAL", DenseOp::kReciprocal)
      .value("ERF", DenseOp::kErf)
      .value("SQUARE", DenseOp::kSquare)
      .value("COS", DenseOp::kCos)
      .value("SIN", DenseOp::kSin)
      .value("ADD", DenseOp::kAdd)
      .value("SUB", DenseOp::kSub)
      .value("MUL", DenseOp::kMul)
      .value("DIV", DenseOp::kDiv)
      .value("POW", DenseOp::kPow)
      .value("MAX", DenseOp::kMax)
      .value("MIN", DenseOp::kMin)
      .value("SUM", DenseOp::kSum)
      .value("AMAX", DenseOp::kAmax)
      .value("AMIN", DenseOp::kAmin)
      .value("PRODUCT", DenseOp::kProduct)
      .value("SELECT", DenseOp::kSelect);
  nb::class_<DenseExecutor>(m, "DenseExecutor", "Steps over float32 in flat buffers for one set of shapes, in one call.")
      .def("__init__", &make, "buffers"_a, "given"_a, "outputs"_a, "steps"_a,
           "Buffers are (numbers, whether they are int64): those given, the outputs, then scratch. A step is (operation, shape, operands), "
           "an operand (buffer, offset, strides), the first of them the result. Checks that no step reaches outside of a buffer.")
      .def("run", &run, "addresses"_a,
           "Addresses of the buffers that are given and of the outputs. The caller has made sure that they have the sizes of `buffers`.");
}
