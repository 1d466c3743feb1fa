#include "monolith/rank_exchange.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "float_vectors.h"
#include "kernels/kernels.h"
#include "monolith/buckets.h"
#include "monolith/error.h"
#include "monolith/hash.h"
#include "monolith/ragged.h"
#include "monolith/thread_pool.h"

namespace monolith {
namespace {

// Requests below this are handled by one thread.
constexpr std::size_t kParallelIds = 16384;

constexpr std::size_t kHead = 2;  // hash and number of tables

template <typename F>
void for_each_table(std::size_t tables, std::size_t num_ids, const F& f) {
  if (num_ids >= kParallelIds && num_threads() > 1) return parallel_for(tables, f);
  for (std::size_t t = 0; t < tables; ++t) f(t);
}

[[gnu::always_inline]] inline void add_row(float* to, const float* from, std::size_t dim) noexcept {
  const std::size_t whole = dim / 4 * 4;
  Vector4 sum, x;
  for (std::size_t k = 0; k < whole; k += 4) {
    load(sum, to + k);
    load(x, from + k);
    sum += x;
    store(sum, to + k);
  }
  for (std::size_t k = whole; k < dim; ++k) to[k] += from[k];
}

[[gnu::always_inline]] inline void add_scaled_row(float* to, const float* from, float factor, std::size_t dim) noexcept {
  const std::size_t whole = dim / 4 * 4;
  Vector4 sum, x;
  for (std::size_t k = 0; k < whole; k += 4) {
    load(sum, to + k);
    load(x, from + k);
    sum += x * factor;
    store(sum, to + k);
  }
  for (std::size_t k = whole; k < dim; ++k) to[k] += from[k] * factor;
}

[[gnu::always_inline]] inline void scale_row(float* to, const float* from, float factor, std::size_t dim) noexcept {
  const std::size_t whole = dim / 4 * 4;
  Vector4 x;
  for (std::size_t k = 0; k < whole; k += 4) {
    load(x, from + k);
    x *= factor;
    store(x, to + k);
  }
  for (std::size_t k = whole; k < dim; ++k) to[k] = from[k] * factor;
}

// Rows of the usual sizes, without and with a bias, go through code that knows their size.
template <typename F>
[[gnu::always_inline]] inline void with_dim(std::size_t dim, const F& f) {
  switch (dim) {
    case 1: return f(std::integral_constant<std::size_t, 1>{});
    case 4: return f(std::integral_constant<std::size_t, 4>{});
    case 8: return f(std::integral_constant<std::size_t, 8>{});
    case 9: return f(std::integral_constant<std::size_t, 9>{});
    case 16: return f(std::integral_constant<std::size_t, 16>{});
    case 17: return f(std::integral_constant<std::size_t, 17>{});
    case 32: return f(std::integral_constant<std::size_t, 32>{});
    case 33: return f(std::integral_constant<std::size_t, 33>{});
    case 64: return f(std::integral_constant<std::size_t, 64>{});
    case 65: return f(std::integral_constant<std::size_t, 65>{});
    default: return f(dim);
  }
}

// Positions of the distinct ids of one table, found by hash. Those of the table before need not be removed: their marks are older.
class Positions {
 public:
  static Positions& of_this_thread() {
    static thread_local Positions positions;
    return positions;
  }

  void start(std::size_t ids) {
    std::size_t capacity = 64;
    while (capacity < 2 * ids) capacity *= 2;
    if (capacity > marks_.size() || UINT32_MAX - base_ <= ids) {
      marks_.assign(std::max(capacity, marks_.size()), 0);
      base_ = 0;
    }
    mask_ = capacity - 1;
  }

  // The mark where the id with this hash is, or is to be put.
  template <typename IsId>
  [[gnu::always_inline]] std::uint32_t& find(std::uint64_t hash, const IsId& is_id) {
    for (std::uint64_t at = hash & mask_;; at = (at + 1) & mask_) {
      std::uint32_t& mark = marks_[at];
      if (mark <= base_ || is_id(mark - base_ - 1)) return mark;
    }
  }

  bool is_set(std::uint32_t mark) const noexcept { return mark > base_; }
  std::uint32_t mark_of(std::uint32_t position) const noexcept { return base_ + position + 1; }
  std::uint32_t position_of(std::uint32_t mark) const noexcept { return mark - base_ - 1; }
  void finish(std::size_t distinct) noexcept { base_ += static_cast<std::uint32_t>(distinct); }

 private:
  std::vector<std::uint32_t> marks_;
  std::uint32_t base_ = 0;
  std::uint64_t mask_ = 0;
};

}  // namespace

template <typename OwnerOf>
void OwnerSplit::find_distinct(Slot& slot, std::span<const std::int64_t> ids, std::span<std::int64_t> sizes,
                               const OwnerOf& owner_of) {
  Positions& positions = Positions::of_this_thread();
  positions.start(ids.size());
  std::int64_t* const distinct = distinct_.get() + slot.first;
  std::uint16_t* const owner = owner_.get() + slot.first;
  std::uint32_t* const count = count_.get() + slot.first;
  std::uint32_t* const place_of = place_of_.get() + slot.first;
  std::uint32_t found = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::int64_t id = ids[i];
    const std::uint64_t hash = hash_id(id);
    std::uint32_t& mark = positions.find(hash, [&](std::uint32_t position) { return distinct[position] == id; });
    if (!positions.is_set(mark)) {
      mark = positions.mark_of(found);
      const std::uint16_t of = owner_of(id, hash);
      distinct[found] = id;
      owner[found] = of;
      count[found] = 0;
      ++sizes[of];
      ++found;
    }
    const std::uint32_t position = positions.position_of(mark);
    place_of[i] = position;
    ++count[position];
  }
  positions.finish(found);
  slot.distinct = found;
}

OwnerSplit::OwnerSplit(std::span<const SplitTable> tables, std::span<const std::uint16_t> owners, std::size_t num_owners,
                       std::int64_t tables_hash)
    : num_owners_(num_owners) {
  if (num_owners == 0 || num_owners > kBuckets) {
    throw InvalidArgument("num_owners: expected 1.." + std::to_string(kBuckets) + ", got " + std::to_string(num_owners));
  }
  if (!owners.empty() && owners.size() != kBuckets) {
    throw InvalidArgument("owners: expected one per bucket, " + std::to_string(kBuckets) + ", got " + std::to_string(owners.size()));
  }
  for (const std::uint16_t owner : owners) {
    if (owner >= num_owners) {
      throw InvalidArgument("owners: expected 0.." + std::to_string(num_owners - 1) + ", got " + std::to_string(owner));
    }
  }
  tables_.reserve(tables.size());
  for (const SplitTable& table : tables) {
    if (table.ids.size() >= UINT32_MAX / 2) throw InvalidArgument("ids: expected fewer than 2^31 of a table; split the batch");
    tables_.push_back({table.dim, table.counted, num_ids_, table.ids.size(), 0});
    num_ids_ += table.ids.size();
  }
  place_of_ = std::make_unique_for_overwrite<std::uint32_t[]>(num_ids_);
  distinct_ = std::make_unique_for_overwrite<std::int64_t[]>(num_ids_);
  owner_ = std::make_unique_for_overwrite<std::uint16_t[]>(num_ids_);
  count_ = std::make_unique_for_overwrite<std::uint32_t[]>(num_ids_);
  offset_ = std::make_unique_for_overwrite<std::size_t[]>(num_ids_);

  std::vector<std::int64_t> by_table(tables.size() * num_owners, 0);  // [tables, owners], so that threads write apart
  for_each_table(tables.size(), num_ids_, [&](std::size_t t) {
    const auto sizes = std::span(by_table).subspan(t * num_owners, num_owners);
    if (owners.empty()) {
      find_distinct(tables_[t], tables[t].ids, sizes, [num_owners](std::int64_t id, std::uint64_t) {
        return static_cast<std::uint16_t>(static_cast<std::uint64_t>(id) % num_owners);
      });
    } else {
      find_distinct(tables_[t], tables[t].ids, sizes,
                    [&](std::int64_t, std::uint64_t hash) { return owners[fast_range(hash, kBuckets)]; });
    }
  });
  sizes_.resize(by_table.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    for (std::size_t owner = 0; owner < num_owners; ++owner) sizes_[owner * tables.size() + t] = by_table[t * num_owners + owner];
  }
  write_messages(tables, tables_hash);
}

void OwnerSplit::write_messages(std::span<const SplitTable> tables, std::int64_t tables_hash) {
  const std::size_t num_tables = tables.size();
  const std::size_t head = kHead + 2 * num_tables;
  message_starts_.assign(num_owners_ + 1, 0);
  float_starts_.assign(num_owners_ + 1, 0);
  struct Region {
    std::size_t id, count, offset;  // where the next id, its count and its row are
  };
  std::vector<Region> regions(num_tables * num_owners_);  // [tables, owners]
  for (std::size_t owner = 0; owner < num_owners_; ++owner) {
    std::size_t id = message_starts_[owner] + head, offset = 0;
    for (std::size_t t = 0; t < num_tables; ++t) {
      const auto size = static_cast<std::size_t>(sizes(owner)[t]);
      regions[t * num_owners_ + owner] = {id, 0, offset};
      id += size;
      offset += size * tables[t].dim;
    }
    for (std::size_t t = 0; t < num_tables; ++t) {
      if (!tables[t].counted) continue;
      regions[t * num_owners_ + owner].count = id;
      id += static_cast<std::size_t>(sizes(owner)[t]);
    }
    message_starts_[owner + 1] = id;
    float_starts_[owner + 1] = float_starts_[owner] + offset;
  }
  messages_.resize(message_starts_.back());
  for (std::size_t owner = 0; owner < num_owners_; ++owner) {
    std::int64_t* const message = messages_.data() + message_starts_[owner];
    message[0] = tables_hash;
    message[1] = static_cast<std::int64_t>(num_tables);
    for (std::size_t t = 0; t < num_tables; ++t) {
      message[kHead + 2 * t] = tables[t].number;
      message[kHead + 2 * t + 1] = sizes(owner)[t];
    }
  }
  for_each_table(num_tables, num_ids_, [&](std::size_t t) {
    const Slot& slot = tables_[t];
    Region* const region = regions.data() + t * num_owners_;
    for (std::size_t p = slot.first; p < slot.first + slot.distinct; ++p) {
      Region& to = region[owner_[p]];
      messages_[to.id++] = distinct_[p];
      if (slot.counted) messages_[to.count++] = count_[p];
      offset_[p] = to.offset;
      to.offset += slot.dim;
    }
  });
}

std::span<const std::int64_t> OwnerSplit::message(std::size_t owner) const noexcept {
  return std::span(messages_).subspan(message_starts_[owner], message_starts_[owner + 1] - message_starts_[owner]);
}

std::span<const std::int64_t> OwnerSplit::sizes(std::size_t owner) const noexcept {
  return std::span(sizes_).subspan(owner * tables_.size(), tables_.size());
}

void OwnerSplit::row_offsets(std::span<std::int64_t> out) const {
  if (out.size() != num_ids_) throw InvalidArgument("out: expected one per id, " + std::to_string(num_ids_));
  for (const Slot& slot : tables_) {
    for (std::size_t i = slot.first; i < slot.first + slot.size; ++i) {
      const std::size_t p = slot.first + place_of_[i];
      out[i] = static_cast<std::int64_t>(float_starts_[owner_[p]] + offset_[p]);
    }
  }
}

template <typename Float>
void OwnerSplit::check(std::span<const SplitBags<Float>> bags) const {
  if (bags.size() != tables_.size()) {
    throw InvalidArgument("bags: expected those of " + std::to_string(tables_.size()) + " tables, got " + std::to_string(bags.size()));
  }
  for (std::size_t t = 0; t < bags.size(); ++t) {
    if (!bags[t].offsets.empty()) check_row_splits(bags[t].offsets, tables_[t].size, bags[t].offsets.front());
  }
}

void OwnerSplit::pool(std::span<const std::span<const float>> rows, std::span<const SplitBags<float>> bags) const {
  check(bags);
  if (rows.size() != num_owners_) throw InvalidArgument("rows: expected those of " + std::to_string(num_owners_) + " owners");
  std::vector<const float*> first(num_owners_);
  for (std::size_t owner = 0; owner < num_owners_; ++owner) {
    const std::size_t expected = float_starts_[owner + 1] - float_starts_[owner];
    if (rows[owner].size() != expected) {
      throw InvalidArgument("rows: expected " + std::to_string(expected) + " floats of owner " + std::to_string(owner) + ", got " +
                            std::to_string(rows[owner].size()));
    }
    first[owner] = rows[owner].data();
  }
  for_each_table(tables_.size(), num_ids_, [&](std::size_t t) {
    const Slot& slot = tables_[t];
    const SplitBags<float>& to = bags[t];
    const std::uint32_t* const place_of = place_of_.get() + slot.first;
    const std::uint16_t* const owner = owner_.get() + slot.first;
    const std::size_t* const offset = offset_.get() + slot.first;
    with_dim(slot.dim, [&](auto dim) {
      const auto row_of = [&](std::size_t i) { return first[owner[place_of[i]]] + offset[place_of[i]]; };
      if (to.offsets.empty()) {
        for (std::size_t i = 0; i < slot.size; ++i) std::memcpy(to.vectors + i * to.stride, row_of(i), dim * sizeof(float));
        return;
      }
      std::size_t i = 0;
      for (std::size_t bag = 0; bag + 1 < to.offsets.size(); ++bag) {
        float* const out = to.vectors + bag * to.stride;
        const auto size = static_cast<std::size_t>(to.offsets[bag + 1] - to.offsets[bag]);
        std::memset(out, 0, dim * sizeof(float));
        for (const std::size_t end = i + size; i < end; ++i) add_row(out, row_of(i), dim);
        if (to.pooling != Pooling::kSum && size > 1) scale_row(out, out, pooling_factor(to.pooling, static_cast<std::int64_t>(size)), dim);
      }
    });
  });
}

void OwnerSplit::sum(std::span<const SplitBags<const float>> bags, float weight, std::span<float> out) const {
  check(bags);
  if (out.size() != float_starts_.back()) {
    throw InvalidArgument("out: expected " + std::to_string(float_starts_.back()) + " floats, got " + std::to_string(out.size()));
  }
  for_each_table(tables_.size(), num_ids_, [&](std::size_t t) {
    const Slot& slot = tables_[t];
    const SplitBags<const float>& from = bags[t];
    const std::uint32_t* const place_of = place_of_.get() + slot.first;
    const std::uint16_t* const owner = owner_.get() + slot.first;
    const std::size_t* const offset = offset_.get() + slot.first;
    std::uint32_t next = 0;  // distinct ids are numbered by first occurrence: this is the first one without a sum
    with_dim(slot.dim, [&](auto dim) {
      const auto add = [&](std::size_t i, const float* grad, float factor) {
        const std::uint32_t place = place_of[i];
        float* const sum = out.data() + float_starts_[owner[place]] + offset[place];
        if (place == next) {
          ++next;
          factor == 1.0f ? static_cast<void>(std::memcpy(sum, grad, dim * sizeof(float))) : scale_row(sum, grad, factor, dim);
        } else {
          factor == 1.0f ? add_row(sum, grad, dim) : add_scaled_row(sum, grad, factor, dim);
        }
      };
      if (from.offsets.empty()) {
        for (std::size_t i = 0; i < slot.size; ++i) add(i, from.vectors + i * from.stride, weight);
        return;
      }
      std::size_t i = 0;
      for (std::size_t bag = 0; bag + 1 < from.offsets.size(); ++bag) {
        const auto size = static_cast<std::size_t>(from.offsets[bag + 1] - from.offsets[bag]);
        const float factor =
            from.pooling == Pooling::kSum ? weight : weight * pooling_factor(from.pooling, static_cast<std::int64_t>(size));
        for (const std::size_t end = i + size; i < end; ++i) add(i, from.vectors + bag * from.stride, factor);
      }
    });
  });
}

namespace {

struct MessageTable {
  std::size_t number;
  std::span<const std::int64_t> ids;
  std::span<const std::int64_t> counts;  // empty unless the table has an admission filter
};

[[noreturn]] void refuse(const std::string& why) { throw InvalidArgument("a message of a rank: " + why); }

// The tables of a message, checked to be inside of it.
template <typename TablePointer>
std::vector<MessageTable> parse(std::span<const std::int64_t> message, std::span<TablePointer const> tables) {
  if (message.size() < kHead) refuse("it has no head");
  const std::int64_t count = message[1];
  if (count < 0 || static_cast<std::uint64_t>(count) > (message.size() - kHead) / 2) {
    refuse("it names " + std::to_string(count) + " tables, which it is too short for");
  }
  const auto num_tables = static_cast<std::size_t>(count);
  auto left = message.subspan(kHead + 2 * num_tables);
  std::vector<MessageTable> parsed(num_tables);
  const auto take = [&](std::int64_t size) {
    if (size < 0 || static_cast<std::uint64_t>(size) > left.size()) refuse("it has fewer ids than it says");
    const auto taken = left.first(static_cast<std::size_t>(size));
    left = left.subspan(taken.size());
    return taken;
  };
  for (std::size_t t = 0; t < num_tables; ++t) {
    const std::int64_t number = message[kHead + 2 * t];
    if (number < 0 || static_cast<std::uint64_t>(number) >= tables.size()) {
      refuse("it names table " + std::to_string(number) + " of " + std::to_string(tables.size()));
    }
    parsed[t] = {static_cast<std::size_t>(number), take(message[kHead + 2 * t + 1]), {}};
  }
  for (MessageTable& table : parsed) {
    if (tables[table.number]->has_admission()) table.counts = take(static_cast<std::int64_t>(table.ids.size()));
    for (const std::int64_t times : table.counts) {
      if (times < 1) refuse("it says that an id occurred " + std::to_string(times) + " times");
    }
  }
  if (!left.empty()) refuse("it has more ids than it says");
  return parsed;
}

}  // namespace

std::vector<std::size_t> lookup_messages(std::span<const Table* const> tables, std::span<const std::span<const std::int64_t>> messages,
                                         std::span<float> out) {
  std::vector<std::size_t> ends;
  ends.reserve(messages.size());
  std::vector<TableRead> reads;
  std::vector<std::size_t> starts;
  std::size_t end = 0;
  for (const auto message : messages) {
    for (const MessageTable& table : parse(message, tables)) {
      const Table* const from = tables[table.number];
      starts.push_back(end);
      reads.push_back({from, table.ids, {}, Pooling::kSum, nullptr, from->dim()});
      end += table.ids.size() * from->dim();
    }
    ends.push_back(end);
  }
  if (end > out.size()) return ends;
  for (std::size_t i = 0; i < reads.size(); ++i) reads[i].out = out.data() + starts[i];
  lookup_many(reads);
  return ends;
}

void apply_messages(std::span<Table* const> tables, std::span<const std::span<const std::int64_t>> messages,
                    std::span<const std::span<const float>> grads, const UpdateOptions& options) {
  if (grads.size() != messages.size()) throw InvalidArgument("grads: expected those of " + std::to_string(messages.size()) + " messages");
  struct Joined {
    bool named = false;
    std::size_t size = 0, first = 0;  // ids, and the first of them in the arrays below
  };
  std::vector<Joined> joined(tables.size());
  std::vector<std::vector<MessageTable>> parsed;
  parsed.reserve(messages.size());
  std::size_t num_ids = 0;
  for (std::size_t m = 0; m < messages.size(); ++m) {
    parsed.push_back(parse(messages[m], tables));
    std::size_t floats = 0;
    for (const MessageTable& table : parsed.back()) {
      joined[table.number].named = true;
      joined[table.number].size += table.ids.size();
      num_ids += table.ids.size();
      floats += table.ids.size() * tables[table.number]->dim();
    }
    if (floats != grads[m].size()) {
      refuse("expected " + std::to_string(floats) + " floats of gradients, got " + std::to_string(grads[m].size()));
    }
  }
  std::size_t first = 0;
  for (Joined& table : joined) {
    table.first = first;
    first += table.size;
    table.size = 0;
  }
  // Gradients stay where they are: only their addresses are put in order.
  const auto ids = std::make_unique_for_overwrite<std::int64_t[]>(num_ids);
  const auto rows = std::make_unique_for_overwrite<const float*[]>(num_ids);
  const auto counts = std::make_unique_for_overwrite<std::int64_t[]>(num_ids);
  for (std::size_t m = 0; m < messages.size(); ++m) {
    const float* grad = grads[m].data();
    for (const MessageTable& table : parsed[m]) {
      Joined& to = joined[table.number];
      const std::size_t at = to.first + to.size, dim = tables[table.number]->dim();
      std::ranges::copy(table.ids, ids.get() + at);
      std::ranges::copy(table.counts, counts.get() + at);
      for (std::size_t i = 0; i < table.ids.size(); ++i, grad += dim) rows[at + i] = grad;
      to.size += table.ids.size();
    }
  }
  std::vector<TableUpdate> updates;
  updates.reserve(tables.size());
  auto rates = options.learning_rates;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::size_t segments = tables[t]->config().segments.size();
    if (rates.size() < segments) throw InvalidArgument("learning_rates: expected one per segment of every table, got fewer");
    const Joined& from = joined[t];
    if (from.named) {
      TableUpdate update{tables[t], {ids.get() + from.first, from.size}, {}, Pooling::kSum, nullptr, 0, options};
      update.options.learning_rates = rates.first(segments);
      update.rows = rows.get() + from.first;
      if (tables[t]->has_admission()) update.counts = {counts.get() + from.first, from.size};
      updates.push_back(update);
    }
    rates = rates.subspan(segments);
  }
  apply_many(updates);
}

}  // namespace monolith
