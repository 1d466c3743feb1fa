#include "monolith/admission.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>

#include "arrays.h"
#include "module.h"
#include "unlocked.h"

namespace nb = nanobind;
using monolith::AdmissionFilter;
using monolith::ProbabilisticFilter;
using monolith::SlidingFilter;
using monolith::SlotThresholds;
using SlotMap = std::map<std::uint32_t, std::uint32_t>;

namespace {

void init_base(nb::module_& m) {
  nb::class_<AdmissionFilter>(m, "AdmissionFilter", "Decides which ids that a table does not hold may enter it.")
      .def(
          "admit",
          [](AdmissionFilter& self, const InVector<std::int64_t>& ids,
             const std::optional<InVector<std::uint32_t>>& counts) {
            Buffer<bool> admitted(ids.size());
            {
              const Unlocked unlocked;
              self.admit(as_span(ids), counts ? as_span(*counts) : std::span<const std::uint32_t>(), admitted.span());
            }
            return std::move(admitted).vector();
          },
          nb::arg("ids").noconvert(), nb::arg("counts").noconvert().none() = nb::none(),
          "Counts each occurrence in order; true where the update may go through.")
      .def(
          "serialize",
          [](const AdmissionFilter& self) {
            std::vector<std::byte> bytes;
            {
              const Unlocked unlocked;
              bytes = self.serialize();
            }
            return nb::bytes(bytes.data(), bytes.size());
          },
          "The whole state, versioned and checksummed.")
      .def(
          "restore",
          [](AdmissionFilter& self, const nb::bytes& bytes) {
            const std::span view(static_cast<const std::byte*>(bytes.data()), bytes.size());
            const Unlocked unlocked;
            self.restore(view);
          },
          nb::arg("bytes"), "Replaces the state by what serialize() gave.")
      .def("threshold", &AdmissionFilter::threshold, nb::arg("id"))
      .def_prop_ro("nbytes", &AdmissionFilter::bytes, nb::call_guard<Unlocked>());
}

}  // namespace

void init_admission(nb::module_& m) {
  init_base(m);
  nb::class_<SlidingFilter, AdmissionFilter>(m, "SlidingFilter", "Drops the first `threshold` occurrences of an id.")
      .def(
          "__init__",
          [](SlidingFilter* self, std::uint64_t capacity, std::uint32_t split_num, std::uint32_t default_threshold,
             const SlotMap& slot_thresholds) {
            new (self) SlidingFilter(capacity, split_num, SlotThresholds(default_threshold, slot_thresholds));
          },
          nb::arg("capacity"), nb::arg("split_num"), nb::arg("default_threshold"), nb::arg("slot_thresholds"))
      .def("get", &SlidingFilter::get, nb::arg("id"), nb::call_guard<Unlocked>(),
           "The count of an id, without changing it.")
      .def_prop_ro("capacity", &SlidingFilter::capacity)
      .def_prop_ro("split_num", &SlidingFilter::split_num)
      .def_prop_ro("max_nbytes", &SlidingFilter::max_bytes)
      .def_prop_ro("head", &SlidingFilter::head, nb::call_guard<Unlocked>())
      .def_prop_ro("head_increment", &SlidingFilter::head_increment, nb::call_guard<Unlocked>())
      .def_prop_ro("failure_count", &SlidingFilter::failure_count, nb::call_guard<Unlocked>())
      .def_prop_ro("elements", [](const SlidingFilter& self) {
        const Unlocked unlocked;
        return self.elements();
      });

  nb::class_<ProbabilisticFilter, AdmissionFilter>(m, "ProbabilisticFilter", "Admits each occurrence by chance.")
      .def(
          "__init__",
          [](ProbabilisticFilter* self, bool equal_probability, std::uint64_t seed, std::uint32_t default_threshold,
             const SlotMap& slot_thresholds) {
            new (self) ProbabilisticFilter(equal_probability, seed, SlotThresholds(default_threshold, slot_thresholds));
          },
          nb::arg("equal_probability"), nb::arg("seed"), nb::arg("default_threshold"), nb::arg("slot_thresholds"))
      .def("probability", &ProbabilisticFilter::probability, nb::arg("threshold"), nb::arg("count"))
      .def_prop_ro("draws", &ProbabilisticFilter::draws);
}
