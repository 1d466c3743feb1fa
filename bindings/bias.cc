#include "monolith/bias.h"

#include "arrays.h"
#include "module.h"
#include "unlocked.h"

namespace nb = nanobind;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void init_bias(nb::module_& m) {
  m.def(
      "split_bias",
      [](const InMatrix<float>& rows, const Out& bias, const Out& vectors) {
        const Unlocked unlocked;
        monolith::split_bias(as_span(rows), as_span(bias), as_span(vectors));
      },
      nb::arg("rows").noconvert(), nb::arg("bias").noconvert(), nb::arg("vectors").noconvert());
  m.def(
      "join_bias",
      [](const InMatrix<float>& bias, const InMatrix<float>& vectors, const Out& rows) {
        const Unlocked unlocked;
        monolith::join_bias(as_span(bias), as_span(vectors), as_span(rows));
      },
      nb::arg("bias").noconvert(), nb::arg("vectors").noconvert(), nb::arg("rows").noconvert());
}
