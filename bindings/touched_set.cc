#include "monolith/touched_set.h"

#include "arrays.h"
#include "module.h"

namespace nb = nanobind;
using monolith::ChangedIdSet;
using monolith::TouchedKeySet;

void init_touched_set(nb::module_& m) {
  nb::class_<TouchedKeySet>(m, "TouchedKeySet", "Bounded set of written ids; forgets all of them when over capacity.")
      .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("capacity") = TouchedKeySet::kDefaultCapacity,
           nb::arg("concurrency_level") = TouchedKeySet::kDefaultConcurrencyLevel)
      .def(
          "insert",
          [](TouchedKeySet& self, const InVector<std::int64_t>& ids) {
            const nb::gil_scoped_release release;
            return self.insert(as_span(ids));
          },
          nb::arg("ids").noconvert(), "Adds the ids in order; returns how many ids were dropped.")
      .def(
          "steal",
          [](TouchedKeySet& self) {
            auto stolen = std::make_unique<std::vector<std::int64_t>>();
            {
              const nb::gil_scoped_release release;
              *stolen = self.steal();
            }
            return adopt<std::int64_t>(std::move(stolen));
          },
          "All ids, in no particular order; the set is empty afterwards.")
      .def(
          "__len__", [](const TouchedKeySet& self) { return self.size(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("capacity", &TouchedKeySet::capacity)
      .def_prop_ro("stripes", &TouchedKeySet::stripes)
      .def_prop_ro("nbytes", &TouchedKeySet::bytes, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<ChangedIdSet>(m, "ChangedIdSet", "Set of changed ids that forgets one only when its change is durable.")
      .def(nb::init<>())
      .def(
          "insert",
          [](ChangedIdSet& self, const InVector<std::int64_t>& ids) {
            const nb::gil_scoped_release release;
            self.insert(as_span(ids));
          },
          nb::arg("ids").noconvert())
      .def(
          "steal",
          [](ChangedIdSet& self) {
            auto copy = std::make_unique<std::vector<std::int64_t>>();
            {
              const nb::gil_scoped_release release;
              const ChangedIdSet::Batch batch = self.steal();
              try {
                *copy = *batch;  // the array is the caller's to change, the batch in flight is not
              } catch (...) {
                self.rollback();
                throw;
              }
            }
            return adopt<std::int64_t>(std::move(copy));
          },
          "Moves every waiting id into flight and returns them.")
      .def("commit", &ChangedIdSet::commit, nb::call_guard<nb::gil_scoped_release>(), "Forgets the ids in flight.")
      .def("rollback", &ChangedIdSet::rollback, nb::call_guard<nb::gil_scoped_release>(),
           "Puts the ids in flight back, merged with newer ones.")
      .def(
          "__len__", [](const ChangedIdSet& self) { return self.size(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("in_flight", &ChangedIdSet::in_flight, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("nbytes", &ChangedIdSet::bytes, nb::call_guard<nb::gil_scoped_release>());
}
