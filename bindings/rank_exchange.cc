// What ranks send each other: one call for all tables of a batch, the interpreter's lock released once.
#include "monolith/rank_exchange.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "module.h"
#include "packed.h"
#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::InvalidArgument;
using monolith::OwnerSplit;
using monolith::SplitBags;
using monolith::SplitTable;
using monolith::Table;
using packed::Gradients, packed::Ids, packed::Outputs, packed::Places, packed::Poolings;

namespace {

using Floats = InVector<float>;
using OutFloats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = InVector<std::uint8_t>;
using Owners = InVector<std::uint16_t>;

std::unique_ptr<OwnerSplit> make_split(const Ids& tables, const Ids& dims, const Flags& counted, const Ids& ids,
                                       const std::optional<Ids>& offsets, const Places& places, const std::optional<Owners>& owners,
                                       std::size_t num_owners, std::int64_t tables_hash) {
  const std::vector<packed::Bags> bags = packed::bags_of(tables.size(), ids, offsets, places);
  packed::require_count("dims", tables.size(), dims.size());
  packed::require_count("counted", tables.size(), counted.size());
  std::vector<SplitTable> split;
  split.reserve(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::int64_t dim = dims.data()[t];
    if (dim < 1 || dim > INT32_MAX) throw InvalidArgument("dims: expected at least 1, got " + std::to_string(dim));
    split.push_back({tables.data()[t], static_cast<std::uint32_t>(dim), counted.data()[t] != 0, bags[t].ids});
  }
  const Unlocked unlocked;
  return std::make_unique<OwnerSplit>(split, owners ? as_span(*owners) : std::span<const std::uint16_t>(), num_owners, tables_hash);
}

// The bags of each table, whose vectors are in `arrays` where `places` says.
template <typename Float, typename Array>
std::vector<SplitBags<Float>> bags_in(const char* name, const std::vector<std::uint32_t>& dims, const std::vector<Array>& arrays,
                                      const Poolings& poolings, const std::optional<Ids>& offsets, const Places& places) {
  packed::require_count("places", dims.size(), places.shape(0));
  packed::require_count("poolings", dims.size(), poolings.size());
  std::vector<SplitBags<Float>> bags;
  bags.reserve(dims.size());
  std::size_t first_bag = 0;
  for (std::size_t t = 0; t < dims.size(); ++t) {
    const std::int64_t* const place = places.data() + t * 4;
    if (place[1] < 0 || static_cast<std::size_t>(place[1]) >= arrays.size()) throw InvalidArgument("places: there is no such array");
    const std::size_t left = offsets ? offsets->size() - first_bag : SIZE_MAX;
    if (place[0] < 0 || static_cast<std::size_t>(place[0]) >= left) throw InvalidArgument("offsets: expected those of the bags in `places`");
    const auto count = static_cast<std::size_t>(place[0]);
    const auto [vectors, stride] =
        packed::vectors(name, std::to_string(t), dims[t], arrays[static_cast<std::size_t>(place[1])], count, place[2], place[3]);
    const auto splits = offsets ? as_span(*offsets).subspan(first_bag, count + 1) : std::span<const std::int64_t>();
    bags.push_back({splits, packed::pooling_of(poolings, t), vectors, stride});
    first_bag += count;
  }
  return bags;
}

// An OwnerSplit, and what is needed to check the arrays that it is called with.
class Split {
 public:
  Split(const Ids& tables, const Ids& dims, const Flags& counted, const Ids& ids, const std::optional<Ids>& offsets,
        const Places& places, const std::optional<Owners>& owners, std::size_t num_owners, std::int64_t tables_hash)
      : split_(make_split(tables, dims, counted, ids, offsets, places, owners, num_owners, tables_hash)), num_ids_(ids.size()) {
    for (const std::int64_t dim : as_span(dims)) dims_.push_back(static_cast<std::uint32_t>(dim));
    for (std::size_t t = 0; t < dims_.size(); ++t) counts_.push_back(places.data()[t * 4]);
    has_offsets_ = offsets.has_value();
  }

  const OwnerSplit& operator*() const noexcept { return *split_; }
  std::size_t num_ids() const noexcept { return num_ids_; }

  void pool(const std::vector<Floats>& rows, const Poolings& poolings, const std::optional<Ids>& offsets, const Places& places,
            const std::vector<Outputs>& outs) const {
    check(offsets, places);
    const auto bags = bags_in<float>("out", dims_, outs, poolings, offsets, places);
    std::vector<std::span<const float>> spans;
    for (const Floats& one : rows) spans.push_back(as_span(one));
    const Unlocked unlocked;
    split_->pool(spans, bags);
  }

  void sum(const std::vector<Gradients>& grads, const Poolings& poolings, const std::optional<Ids>& offsets, const Places& places,
           float weight, const OutFloats& out) const {
    check(offsets, places);
    const auto bags = bags_in<const float>("grads", dims_, grads, poolings, offsets, places);
    const Unlocked unlocked;
    split_->sum(bags, weight, as_span(out));
  }

 private:
  // Without offsets the number of bags is the number of ids: the split has been made of as many.
  void check(const std::optional<Ids>& offsets, const Places& places) const {
    bool same = offsets.has_value() == has_offsets_ && places.shape(0) == counts_.size();
    for (std::size_t t = 0; same && t < counts_.size(); ++t) same = places.data()[t * 4] == counts_[t];
    if (!same) throw InvalidArgument("places: expected the bags that were split");
  }

  std::unique_ptr<OwnerSplit> split_;
  std::size_t num_ids_;
  std::vector<std::uint32_t> dims_;
  std::vector<std::int64_t> counts_;
  bool has_offsets_ = false;
};

std::vector<std::span<const std::int64_t>> spans_of(const std::vector<Ids>& arrays) {
  std::vector<std::span<const std::int64_t>> spans;
  spans.reserve(arrays.size());
  for (const Ids& array : arrays) spans.push_back(as_span(array));
  return spans;
}

std::vector<std::size_t> lookup_messages(const std::vector<const Table*>& tables, const std::vector<Ids>& messages,
                                         const OutFloats& out) {
  const auto spans = spans_of(messages);
  const Unlocked unlocked;
  return monolith::lookup_messages(tables, spans, as_span(out));
}

void apply_messages(const std::vector<Table*>& tables, const std::vector<Ids>& messages, const std::vector<Floats>& grads,
                    const Floats& learning_rates, std::int64_t step, std::uint32_t event_time, bool sequential) {
  const auto spans = spans_of(messages);
  std::vector<std::span<const float>> values;
  for (const Floats& one : grads) values.push_back(as_span(one));
  monolith::UpdateOptions options;
  options.learning_rates = as_span(learning_rates);
  options.step = step;
  options.event_time = event_time;
  options.sequential = sequential;
  const Unlocked unlocked;
  monolith::apply_messages(tables, spans, values, options);
}

}  // namespace

void init_rank_exchange(nb::module_& m) {
  nb::class_<Split>(m, "OwnerSplit", "The distinct ids of the tables of a request by owner, and the messages that ask owners for them.")
      .def(nb::init<const Ids&, const Ids&, const Flags&, const Ids&, const std::optional<Ids>&, const Places&,
                    const std::optional<Owners>&, std::size_t, std::int64_t>(),
           "tables"_a.noconvert(), "dims"_a.noconvert(), "counted"_a.noconvert(), "ids"_a.noconvert(), "offsets"_a.noconvert().none(),
           "places"_a.noconvert(), "owners"_a.noconvert().none(), "num_owners"_a, "tables_hash"_a,
           "`tables` are the numbers of the tables, `owners` uint16 by bucket. Without owners an id belongs to id % num_owners.")
      .def("message",
           [](nb::handle_t<Split> self, std::size_t owner) {
             const OwnerSplit& split = *nb::cast<const Split&>(self);
             if (owner >= split.num_owners()) throw InvalidArgument("owner: there is no " + std::to_string(owner));
             const auto message = split.message(owner);
             return nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>>(message.data(), {message.size()}, self);
           },
           "owner"_a, "int64: what the owner is asked. Shares memory.")
      .def("sizes",
           [](nb::handle_t<Split> self, std::size_t owner) {
             const OwnerSplit& split = *nb::cast<const Split&>(self);
             if (owner >= split.num_owners()) throw InvalidArgument("owner: there is no " + std::to_string(owner));
             const auto sizes = split.sizes(owner);
             return nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>>(sizes.data(), {sizes.size()}, self);
           },
           "owner"_a, "int64: how many ids of each table the owner is asked for. Shares memory.")
      .def_prop_ro("float_starts",
                   [](const Split& self) {
                     std::vector<std::size_t> starts;
                     for (std::size_t owner = 0; owner <= (*self).num_owners(); ++owner) starts.push_back((*self).floats_before(owner));
                     return starts;
                   })
      .def("row_offsets",
           [](const Split& self) {
             Buffer<std::int64_t> offsets(self.num_ids());
             (*self).row_offsets(offsets.span());
             return std::move(offsets).vector();
           },
           "For each id, where its row begins in the rows of all owners, one owner after the other.")
      .def("pool", &Split::pool, "rows"_a.noconvert(), "poolings"_a, "offsets"_a.noconvert().none(), "places"_a.noconvert(),
           "outs"_a.noconvert(), "Pool what the owners answered, as `lookup_packed` does.")
      .def("sum", &Split::sum, "grads"_a.noconvert(), "poolings"_a, "offsets"_a.noconvert().none(), "places"_a.noconvert(), "weight"_a,
           "out"_a.noconvert(), "Sum the gradients of each distinct id, multiplied by `weight`, in the order of the messages.");
  m.def("lookup_messages", &lookup_messages, "tables"_a, "messages"_a.noconvert(), "out"_a.noconvert(),
        "Look up what messages ask for. Returns where the rows of each end; if `out` is smaller than the last, nothing was done.");
  m.def("apply_messages", &apply_messages, "tables"_a, "messages"_a.noconvert(), "grads"_a.noconvert(), "learning_rates"_a.noconvert(),
        "step"_a, "event_time"_a, "sequential"_a,
        "Make one optimizer step per table and id with its gradients in all messages, or with `sequential` one for each message.");
}
