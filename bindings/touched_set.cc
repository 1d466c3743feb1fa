#include "monolith/touched_set.h"

#include "arrays.h"
#include "module.h"
#include "unlocked.h"

namespace nb = nanobind;
using monolith::TouchedKeySet;

void init_touched_set(nb::module_& m) {
  nb::class_<TouchedKeySet>(m, "TouchedKeySet", "Bounded set of written ids; forgets all of them when over capacity.")
      .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("capacity") = TouchedKeySet::kDefaultCapacity,
           nb::arg("concurrency_level") = TouchedKeySet::kDefaultConcurrencyLevel)
      .def(
          "insert",
          [](TouchedKeySet& self, const InVector<std::int64_t>& ids) {
            const Unlocked unlocked;
            return self.insert(as_span(ids));
          },
          nb::arg("ids").noconvert(), "Adds the ids in order; returns how many ids were dropped.")
      .def(
          "steal",
          [](TouchedKeySet& self) {
            auto stolen = std::make_unique<std::vector<std::int64_t>>();
            {
              const Unlocked unlocked;
              *stolen = self.steal();
            }
            return adopt<std::int64_t>(std::move(stolen));
          },
          "All ids, in no particular order; the set is empty afterwards.")
      .def(
          "__len__", [](const TouchedKeySet& self) { return self.size(); }, nb::call_guard<Unlocked>())
      .def_prop_ro("capacity", &TouchedKeySet::capacity)
      .def_prop_ro("stripes", &TouchedKeySet::stripes)
      .def_prop_ro("nbytes", &TouchedKeySet::bytes, nb::call_guard<Unlocked>());
}
