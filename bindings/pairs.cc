#include "monolith/pairs.h"

#include "arrays.h"
#include "module.h"
#include "monolith/error.h"
#include "unlocked.h"

namespace nb = nanobind;
using monolith::PairShape;
using Examples = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using OutExamples = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using OutPairs = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

namespace {

template <typename Array>
PairShape shape_of(const Array& x) {
  return {x.shape(0), x.shape(1), x.shape(2)};
}

}  // namespace

void init_pairs(nb::module_& m) {
  m.def(
      "dot_pairs",
      [](const InMatrix<float>& dense, const Examples& x, const OutPairs& out) {
        const Unlocked unlocked;
        monolith::dot_pairs(shape_of(x), as_span(dense), as_span(x), as_span(out));
      },
      nb::arg("dense").noconvert(), nb::arg("x").noconvert(), nb::arg("out").noconvert(),
      "out [batch, n (n - 1) / 2]: the products of pairs (i, j), j < i. A dense vector, unless it is empty, is one more, before the others, "
      "and comes itself before the products.");
  m.def(
      "dot_pairs_gradient",
      [](const InMatrix<float>& dense, const Examples& x, const InMatrix<float>& grad_out, const OutPairs& grad_dense,
         const OutExamples& grad_x) {
        const Unlocked unlocked;
        monolith::dot_pairs_gradient(shape_of(x), as_span(dense), as_span(x), as_span(grad_out), as_span(grad_dense), as_span(grad_x));
      },
      nb::arg("dense").noconvert(), nb::arg("x").noconvert(), nb::arg("grad_out").noconvert(), nb::arg("grad_dense").noconvert(),
      nb::arg("grad_x").noconvert());
  m.def(
      "sum_pairs",
      [](const Examples& x, const OutPairs& out) {
        const Unlocked unlocked;
        monolith::sum_pairs(shape_of(x), as_span(x), as_span(out));
      },
      nb::arg("x").noconvert(), nb::arg("out").noconvert(), "out [batch, 1]: the sum of the products of all pairs.");
  m.def(
      "sum_pairs_gradient",
      [](const Examples& x, const InMatrix<float>& grad_out, const OutExamples& grad_x) {
        const Unlocked unlocked;
        monolith::sum_pairs_gradient(shape_of(x), as_span(x), as_span(grad_out), as_span(grad_x));
      },
      nb::arg("x").noconvert(), nb::arg("grad_out").noconvert(), nb::arg("grad_x").noconvert());
}
