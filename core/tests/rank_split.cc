// A rank asks each owner for the distinct ids of all tables in one message. An id sent to the wrong owner, sent twice, or a row pooled
// from the place of another id would train a wrong model without an error.
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/buckets.h"
#include "monolith/error.h"
#include "monolith/rank_exchange.h"
#include "monolith/thread_pool.h"

using monolith::OwnerSplit;
using monolith::Pooling;
using monolith::SplitBags;
using monolith::SplitTable;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;

namespace {

struct Table {
  std::uint32_t dim;
  bool counted;
  Pooling pooling;
  Ids ids;
  Ids offsets;  // empty: each id is a bag
  std::size_t bags() const { return offsets.empty() ? ids.size() : offsets.size() - 1; }
};

std::vector<std::uint16_t> even_owners(std::size_t count) {
  std::vector<std::uint16_t> owners(monolith::kBuckets);
  for (std::size_t b = 0; b < owners.size(); ++b) owners[b] = static_cast<std::uint16_t>(b * count / owners.size());
  return owners;
}

std::vector<Table> random_tables(std::mt19937_64& random, std::size_t ids) {
  const std::uint32_t dims[] = {16, 3, 1, 8, 5, 64, 4, 32, 17, 65, 33, 9};
  const Pooling poolings[] = {Pooling::kSum, Pooling::kMean, Pooling::kSqrtN};
  std::vector<Table> tables;
  for (std::size_t t = 0; t < std::size(dims); ++t) {
    Table table{dims[t], t % 3 == 1, poolings[t % 3], {}, {}};
    const std::size_t count = t == 4 ? 0 : random() % (ids + 1);
    for (std::size_t i = 0; i < count; ++i) table.ids.push_back(static_cast<std::int64_t>(random() % (ids / 2 + 1)) * 977 - 5000);
    if (t % 2 == 0) {
      table.offsets = {100};  // cut out of those of a larger request
      std::int64_t left = static_cast<std::int64_t>(count);
      while (left > 0) {
        const auto size = std::min<std::int64_t>(left, static_cast<std::int64_t>(random() % 4));
        table.offsets.push_back(table.offsets.back() + size);
        left -= size;
      }
    }
    tables.push_back(std::move(table));
  }
  return tables;
}

OwnerSplit split_of(const std::vector<Table>& tables, std::span<const std::uint16_t> owners, std::size_t num_owners) {
  std::vector<SplitTable> parts;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    parts.push_back({static_cast<std::int64_t>(t), tables[t].dim, tables[t].counted, tables[t].ids});
  }
  return OwnerSplit(parts, owners, num_owners, 42);
}

// A row that only the id of this table has.
float value_of(std::size_t table, std::int64_t id, std::size_t k) {
  return static_cast<float>(id % 1000) + static_cast<float>(table) * 0.125f + static_cast<float>(k) * 0.0078125f;
}

struct Bag {
  std::size_t first, last;  // ids
};

std::vector<Bag> bags_of(const Table& table) {
  std::vector<Bag> bags;
  for (std::size_t b = 0; b < table.bags(); ++b) {
    if (table.offsets.empty()) {
      bags.push_back({b, b + 1});
    } else {
      bags.push_back({static_cast<std::size_t>(table.offsets[b] - 100), static_cast<std::size_t>(table.offsets[b + 1] - 100)});
    }
  }
  return bags;
}

float factor_of(Pooling pooling, std::size_t size) {
  if (pooling == Pooling::kSum || size < 2) return 1.0f;
  return 1.0f / (pooling == Pooling::kMean ? static_cast<float>(size) : std::sqrt(static_cast<float>(size)));
}

// What the owners would answer.
std::vector<Floats> answers(const OwnerSplit& split, const std::vector<Table>& tables) {
  std::vector<Floats> rows(split.num_owners());
  for (std::size_t owner = 0; owner < split.num_owners(); ++owner) {
    std::size_t at = 2 + 2 * tables.size();
    for (std::size_t t = 0; t < tables.size(); ++t) {
      for (std::int64_t i = 0; i < split.sizes(owner)[t]; ++i, ++at) {
        for (std::size_t k = 0; k < tables[t].dim; ++k) rows[owner].push_back(value_of(t, split.message(owner)[at], k));
      }
    }
  }
  return rows;
}

std::vector<Floats> pooled(const OwnerSplit& split, const std::vector<Table>& tables, const std::vector<Floats>& rows) {
  std::vector<Floats> outs;
  std::vector<SplitBags<float>> bags;
  for (const Table& table : tables) outs.emplace_back(table.bags() * (table.dim + 1), -7.0f);  // one column belongs to others
  for (std::size_t t = 0; t < tables.size(); ++t) {
    bags.push_back({tables[t].offsets, tables[t].pooling, outs[t].data(), tables[t].dim + 1});
  }
  const std::vector<std::span<const float>> spans(rows.begin(), rows.end());
  split.pool(spans, bags);
  return outs;
}

Floats summed(const OwnerSplit& split, const std::vector<Table>& tables, const std::vector<Floats>& grads, float weight) {
  std::vector<SplitBags<const float>> bags;
  for (std::size_t t = 0; t < tables.size(); ++t) bags.push_back({tables[t].offsets, tables[t].pooling, grads[t].data(), tables[t].dim});
  Floats out(split.floats_before(split.num_owners()), -9.0f);
  split.sum(bags, weight, out);
  return out;
}

bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::string message_of(const auto& f) {
  try {
    f();
  } catch (const monolith::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST("the worked example: ids by shard and table, sizes, and where the row of each id is") {
  const Ids one{0, 1, 0}, two{3, 2, 3}, three{5, 6, 7};
  const SplitTable tables[] = {{0, 1, false, one}, {1, 2, false, two}, {2, 3, false, three}};
  const OwnerSplit split(tables, {}, 2, 99);
  Ids ids, sizes;
  for (std::size_t owner = 0; owner < 2; ++owner) {
    const auto message = split.message(owner);
    CHECK_EQ(message[0], 99);
    CHECK_EQ(message[1], 3);
    ids.insert(ids.end(), message.begin() + 8, message.end());
    for (std::size_t t = 0; t < 3; ++t) {
      CHECK_EQ(message[2 + 2 * t], static_cast<std::int64_t>(t));
      CHECK_EQ(message[3 + 2 * t], split.sizes(owner)[t]);
      sizes.push_back(split.sizes(owner)[t]);
    }
  }
  CHECK((ids == Ids{0, 2, 6, 1, 3, 5, 7}));
  CHECK((sizes == Ids{1, 1, 1, 1, 1, 2}));
  Ids offsets(9);
  split.row_offsets(offsets);
  CHECK((offsets == Ids{0, 6, 0, 7, 1, 7, 9, 3, 12}));
}

TEST("each owner is asked once for each of its ids, in the order of first occurrence, and told how often it came") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 30; ++round) {
    const std::size_t num_owners = 1 + random() % 5;
    const auto owners = even_owners(num_owners);
    const auto tables = random_tables(random, round % 3 == 0 ? 5 : 400);
    const OwnerSplit split = split_of(tables, owners, num_owners);
    for (std::size_t owner = 0; owner < num_owners; ++owner) {
      Ids expected{42, static_cast<std::int64_t>(tables.size())}, ids, counts;
      for (std::size_t t = 0; t < tables.size(); ++t) {
        std::map<std::int64_t, std::int64_t> times;
        Ids mine;
        for (const std::int64_t id : tables[t].ids) {
          if (owners[monolith::bucket_of(id)] == owner && times[id]++ == 0) mine.push_back(id);
        }
        expected.insert(expected.end(), {static_cast<std::int64_t>(t), static_cast<std::int64_t>(mine.size())});
        ids.insert(ids.end(), mine.begin(), mine.end());
        if (!tables[t].counted) continue;
        for (const std::int64_t id : mine) counts.push_back(times[id]);
      }
      expected.insert(expected.end(), ids.begin(), ids.end());
      expected.insert(expected.end(), counts.begin(), counts.end());
      const auto message = split.message(owner);
      CHECK(Ids(message.begin(), message.end()) == expected);
    }
  }
}

TEST("bags are pooled from the rows of their own ids, in order, whoever owns them") {
  std::mt19937_64 random(2);
  for (const std::size_t num_owners : {1u, 2u, 3u, 7u}) {
    const auto tables = random_tables(random, 300);
    const OwnerSplit split = split_of(tables, even_owners(num_owners), num_owners);
    const auto outs = pooled(split, tables, answers(split, tables));
    for (std::size_t t = 0; t < tables.size(); ++t) {
      const auto bags = bags_of(tables[t]);
      for (std::size_t b = 0; b < bags.size(); ++b) {
        const float* const out = outs[t].data() + b * (tables[t].dim + 1);
        const float factor = factor_of(tables[t].pooling, bags[b].last - bags[b].first);
        for (std::size_t k = 0; k < tables[t].dim; ++k) {
          float sum = 0;
          for (std::size_t i = bags[b].first; i < bags[b].last; ++i) sum += value_of(t, tables[t].ids[i], k);
          CHECK_EQ(out[k], sum * factor);
        }
        CHECK_EQ(out[tables[t].dim], -7.0f);
      }
    }
  }
}

TEST("gradients of each id are added in order, weighted and divided as pooling does") {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (const float weight : {1.0f, 0.3f}) {
    const auto tables = random_tables(random, 300);
    const OwnerSplit split = split_of(tables, even_owners(3), 3);
    std::vector<Floats> grads;
    for (const Table& table : tables) {
      grads.emplace_back(table.bags() * table.dim);
      for (float& x : grads.back()) x = normal(random);
    }
    const Floats out = summed(split, tables, grads, weight);
    Ids offsets;
    for (const Table& table : tables) offsets.resize(offsets.size() + table.ids.size());
    split.row_offsets(offsets);
    Floats expected(out.size(), 0.0f);
    std::set<std::int64_t> seen;
    std::size_t first = 0;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      const auto bags = bags_of(tables[t]);
      for (std::size_t b = 0; b < bags.size(); ++b) {
        const float factor = weight * factor_of(tables[t].pooling, bags[b].last - bags[b].first);
        for (std::size_t i = bags[b].first; i < bags[b].last; ++i) {
          float* const sum = expected.data() + offsets[first + i];
          const bool is_first = seen.insert(offsets[first + i]).second;
          for (std::size_t k = 0; k < tables[t].dim; ++k) {
            const float grad = grads[t][b * tables[t].dim + k] * factor;
            sum[k] = is_first ? grad : sum[k] + grad;
          }
        }
      }
      first += tables[t].ids.size();
    }
    CHECK(same(out, expected));
  }
}

TEST("several threads give the bits of one") {
  std::mt19937_64 random(4);
  auto tables = random_tables(random, 20000);
  std::vector<Floats> grads;
  for (const Table& table : tables) grads.emplace_back(table.bags() * table.dim, 0.1f);
  const std::size_t before = monolith::num_threads();
  monolith::set_num_threads(1);
  const OwnerSplit alone = split_of(tables, even_owners(2), 2);
  const auto rows = answers(alone, tables);
  const auto expected = pooled(alone, tables, rows);
  const Floats sums = summed(alone, tables, grads, 0.7f);
  monolith::set_num_threads(4);
  const OwnerSplit split = split_of(tables, even_owners(2), 2);
  for (std::size_t owner = 0; owner < 2; ++owner) {
    const auto a = split.message(owner), b = alone.message(owner);
    CHECK(std::vector(a.begin(), a.end()) == std::vector(b.begin(), b.end()));
  }
  const auto outs = pooled(split, tables, rows);
  for (std::size_t t = 0; t < tables.size(); ++t) CHECK(same(outs[t], expected[t]));
  CHECK(same(summed(split, tables, grads, 0.7f), sums));
  monolith::set_num_threads(before);
}

TEST("arrays of another size than the request are refused") {
  const Ids ids{1, 2, 3};
  const SplitTable table[] = {{0, 2, false, ids}};
  const auto owners = even_owners(2);
  const OwnerSplit split(table, owners, 2, 0);
  Floats rows(6), out(6);
  const SplitBags<float> bags[] = {{{}, Pooling::kSum, out.data(), 2}};
  const std::vector<std::span<const float>> one{rows}, swapped{rows, rows};
  CHECK(message_of([&] { split.pool(one, bags); }).starts_with("rows: expected those of 2 owners"));
  CHECK(message_of([&] { split.pool(swapped, bags); }).starts_with("rows: expected"));
  const SplitBags<const float> grads[] = {{{}, Pooling::kSum, out.data(), 2}};
  CHECK(message_of([&] { split.sum(grads, 1.0f, std::span(rows).first(5)); }).starts_with("out: expected 6 floats, got 5"));
  const Ids wrong{0, 2, 4};
  const SplitBags<const float> spoilt[] = {{wrong, Pooling::kSum, out.data(), 2}};
  CHECK(!message_of([&] { split.sum(spoilt, 1.0f, rows); }).empty());
  CHECK(message_of([&] { OwnerSplit(table, {}, 0, 0); }).starts_with("num_owners: expected 1..4096, got 0"));
  CHECK(message_of([&] { OwnerSplit(table, owners, 1, 0); }).starts_with("owners: expected 0..0, got 1"));
  CHECK(message_of([&] { OwnerSplit(table, std::span(owners).first(9), 2, 0); }).starts_with("owners: expected one per bucket"));
  CHECK(message_of([&] { split.row_offsets({}); }).starts_with("out: expected one per id, 3"));
}
