// Requests to several tables at once: one call, and the interpreter's lock released once, for all tables of a batch.
//
// Two forms. Lists: every table has its own arrays, as in the frames that a parameter server gets. Packed: the ids of all tables lie
// behind each other in one array, those of the first table first, and `places` says where the vectors of each table are.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "module.h"
#include "monolith/table.h"
#include "packed.h"
#include "unlocked.h"

namespace nb = nanobind;
using namespace nb::literals;
using monolith::InvalidArgument;
using monolith::Pooling;
using monolith::Table;
using monolith::TableRead;
using monolith::TableUpdate;

namespace {

using packed::Bags, packed::Gradients, packed::Ids, packed::Outputs, packed::Places, packed::Poolings, packed::Rates;
using packed::pooling_of, packed::require_count, packed::shape_of, packed::vectors;

template <typename Array>
auto whole(const char* name, const Table& table, const Array& array, std::size_t bags) {
  if (array.shape(0) != bags || array.shape(1) != table.dim()) {
    throw InvalidArgument("table '" + table.config().name + "': " + name + ": expected " + shape_of(bags, table.dim()) + ", got " +
                          shape_of(array.shape(0), array.shape(1)));
  }
  return vectors(name, table.config().name, table.dim(), array, bags);
}

template <typename Pointer>
std::vector<Bags> listed(const std::vector<Pointer>& tables, const std::vector<Ids>& ids,
                         const std::vector<std::optional<Ids>>& offsets) {
  require_count("ids", tables.size(), ids.size());
  require_count("offsets", tables.size(), offsets.size());
  std::vector<Bags> bags(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    bags[t] = {as_span(ids[t]), {}, ids[t].size()};
    if (!offsets[t]) continue;
    // The core takes no offsets at all for one bag per id, and any first number. Everything else it checks itself.
    if (offsets[t]->size() == 0 || offsets[t]->data()[0] != 0) {
      throw InvalidArgument("table '" + tables[t]->config().name + "': offsets: expected to start with 0");
    }
    bags[t].offsets = as_span(*offsets[t]);
    bags[t].count = offsets[t]->size() - 1;
  }
  return bags;
}

void lookup_many(const std::vector<const Table*>& tables, const std::vector<Pooling>& poolings, const std::vector<Ids>& ids,
                 const std::vector<std::optional<Ids>>& offsets, const std::vector<Outputs>& outs) {
  const std::vector<Bags> bags = listed(tables, ids, offsets);
  require_count("poolings", tables.size(), poolings.size());
  require_count("outs", tables.size(), outs.size());
  std::vector<TableRead> reads;
  reads.reserve(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto [out, stride] = whole("out", *tables[t], outs[t], bags[t].count);
    reads.push_back({tables[t], bags[t].ids, bags[t].offsets, poolings[t], out, stride});
  }
  const Unlocked unlocked;
  monolith::lookup_many(reads);
}

void lookup_packed(const std::vector<const Table*>& tables, const Poolings& poolings, const Ids& ids,
                   const std::optional<Ids>& offsets, const Places& places, const std::vector<Outputs>& outs) {
  const std::vector<Bags> bags = packed::bags_of(tables.size(), ids, offsets, places);
  require_count("poolings", tables.size(), poolings.size());
  std::vector<TableRead> reads;
  reads.reserve(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::int64_t* const place = places.data() + t * 4;
    if (place[1] < 0 || static_cast<std::size_t>(place[1]) >= outs.size()) throw InvalidArgument("places: there is no such array");
    const auto [out, stride] = vectors("out", tables[t]->config().name, tables[t]->dim(), outs[static_cast<std::size_t>(place[1])], bags[t].count, place[2], place[3]);
    reads.push_back({tables[t], bags[t].ids, bags[t].offsets, pooling_of(poolings, t), out, stride});
  }
  const Unlocked unlocked;
  monolith::lookup_many(reads);
}

// Learning rates of all segments of all tables, one after the other.
class RatesInOrder {
 public:
  explicit RatesInOrder(const Rates& rates) : left_(as_span(rates)) {}
  std::span<const float> next(const Table& table) {
    const std::size_t segments = table.config().segments.size();
    if (segments > left_.size()) throw InvalidArgument("learning_rates: expected one per segment of every table, got fewer");
    const auto rates = left_.first(segments);
    left_ = left_.subspan(segments);
    return rates;
  }

 private:
  std::span<const float> left_;
};

void apply_many(const std::vector<Table*>& tables, const std::vector<Pooling>& poolings, const std::vector<Ids>& ids,
                const std::vector<std::optional<Ids>>& offsets, const std::vector<Gradients>& grads,
                const std::vector<Rates>& learning_rates, std::int64_t step, std::uint32_t event_time,
                const std::vector<std::optional<Gradients>>& snapshots) {
  const std::vector<Bags> bags = listed(tables, ids, offsets);
  require_count("poolings", tables.size(), poolings.size());
  require_count("grads", tables.size(), grads.size());
  require_count("learning_rates", tables.size(), learning_rates.size());
  require_count("snapshots", tables.size(), snapshots.size());
  std::vector<TableUpdate> updates;
  updates.reserve(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto [grad, stride] = whole("grads", *tables[t], grads[t], bags[t].count);
    TableUpdate update{tables[t], bags[t].ids, bags[t].offsets, poolings[t], grad, stride, {}};
    update.options.learning_rates = as_span(learning_rates[t]);
    update.options.step = step;
    update.options.event_time = event_time;
    if (snapshots[t]) {
      const auto [snapshot, distance] = whole("snapshot", *tables[t], *snapshots[t], bags[t].ids.size());
      if (bags[t].ids.size() > 1 && distance != tables[t]->dim()) throw InvalidArgument("snapshot: expected a contiguous array");
      update.options.snapshot = snapshot;
    }
    updates.push_back(update);
  }
  const Unlocked unlocked;
  monolith::apply_many(updates);
}

void apply_packed(const std::vector<Table*>& tables, const Poolings& poolings, const Ids& ids,
                  const std::optional<Ids>& offsets, const Places& places, const std::vector<Gradients>& grads,
                  const Rates& learning_rates, std::int64_t step, std::uint32_t event_time) {
  const std::vector<Bags> bags = packed::bags_of(tables.size(), ids, offsets, places);
  require_count("poolings", tables.size(), poolings.size());
  std::vector<TableUpdate> updates;
  updates.reserve(tables.size());
  RatesInOrder rates(learning_rates);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto rates_of_table = rates.next(*tables[t]);
    const std::int64_t* const place = places.data() + t * 4;
    if (place[1] < 0) continue;
    if (static_cast<std::size_t>(place[1]) >= grads.size()) throw InvalidArgument("places: there is no such array");
    const auto [grad, stride] =
        vectors("grads", tables[t]->config().name, tables[t]->dim(), grads[static_cast<std::size_t>(place[1])], bags[t].count, place[2], place[3]);
    TableUpdate update{tables[t], bags[t].ids, bags[t].offsets, pooling_of(poolings, t), grad, stride, {}};
    update.options.learning_rates = rates_of_table;
    update.options.step = step;
    update.options.event_time = event_time;
    updates.push_back(update);
  }
  const Unlocked unlocked;
  monolith::apply_many(updates);
}

}  // namespace

void init_requests(nb::module_& m) {
  m.def("lookup_many", &lookup_many, "tables"_a, "poolings"_a, "ids"_a.noconvert(), "offsets"_a.noconvert(), "outs"_a.noconvert(),
        "Pool bags of several tables, each into its own array [bags, dim]. Without offsets each id is a bag.");
  m.def("lookup_packed", &lookup_packed, "tables"_a, "poolings"_a, "ids"_a.noconvert(), "offsets"_a.noconvert().none(),
        "places"_a.noconvert(), "outs"_a.noconvert(),
        "The same with the ids of all tables in one array. `places` is int64 [tables, 4]: bags, array of `outs`, row, column.");
  m.def("apply_many", &apply_many, "tables"_a, "poolings"_a, "ids"_a.noconvert(), "offsets"_a.noconvert(), "grads"_a.noconvert(),
        "learning_rates"_a.noconvert(), "step"_a, "event_time"_a, "snapshots"_a.noconvert(),
        "Make one optimizer step per table and id with the gradients of what `lookup_many` gave. On an error nothing has changed.");
  m.def("apply_packed", &apply_packed, "tables"_a, "poolings"_a, "ids"_a.noconvert(), "offsets"_a.noconvert().none(),
        "places"_a.noconvert(), "grads"_a.noconvert(), "learning_rates"_a.noconvert(), "step"_a, "event_time"_a,
        "The same for `lookup_packed`. A table whose array is -1 is left as it is; `learning_rates` are those of all segments.");
}
