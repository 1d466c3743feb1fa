// A request to several tables must give each of them the same bits as a separate call: wherever the vectors lie, however the ids
// were packed, and however many threads share the work.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/table.h"
#include "monolith/thread_pool.h"
#include "tables.h"

namespace {

using monolith::Pooling;
using monolith::Table;
using monolith::TableRead;
using monolith::TableUpdate;
using Ids = std::vector<std::int64_t>;
using Floats = std::vector<float>;

std::unique_ptr<Table> make(std::uint32_t number, std::uint32_t dim) {
  auto config = tables::config(monolith::OptimizerKind::kAdagrad, dim);
  config.name = "table " + std::to_string(number);
  config.segments[0].initializer = {monolith::InitializerKind::kUniform, -1.0f, 1.0f};
  return std::make_unique<Table>(config);
}

bool same(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

constexpr float kRate = 0.05f;

// What is asked of one table, and twice the same table: one for the request, one for calls of its own.
struct Part {
  std::unique_ptr<Table> together, alone;
  Ids ids;
  Ids offsets;  // empty: each id is a bag
  Pooling pooling;
  Floats grads;

  std::size_t bags() const { return offsets.empty() ? ids.size() : offsets.size() - 1; }
  std::uint32_t dim() const { return together->dim(); }
  Floats read_alone() const {
    Floats out(bags() * dim());
    offsets.empty() ? alone->lookup(ids, out.data()) : alone->lookup_pooled(ids, offsets, pooling, out.data());
    return out;
  }
  void train_alone() {
    const auto options = tables::options(kRate);
    offsets.empty() ? alone->apply_gradients(ids, grads.data(), options)
                       : alone->apply_pooled_gradients(ids, offsets, pooling, grads.data(), options);
  }
};

// Tables of several dims, with and without offsets, every way of pooling, empty bags and a table without ids.
std::vector<Part> parts(std::size_t tables, std::size_t bags, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Part> made;
  const std::uint32_t dims[] = {16, 5, 8, 16, 1};
  const Pooling poolings[] = {Pooling::kSum, Pooling::kMean, Pooling::kSqrtN};
  for (std::size_t t = 0; t < tables; ++t) {
    const auto number = static_cast<std::uint32_t>(t);
    Part part{make(number, dims[t % 5]), make(number, dims[t % 5]), {}, {}, poolings[t % 3], {}};
    const std::size_t mine = t == 3 ? 0 : bags + random() % 7;
    if (t % 2 == 0) {
      part.offsets.push_back(0);
      for (std::size_t bag = 0; bag < mine; ++bag) {
        part.offsets.push_back(part.offsets.back() + static_cast<std::int64_t>(random() % 4));
      }
    }
    const std::size_t count = t % 2 == 0 ? static_cast<std::size_t>(part.offsets.back()) : mine;
    for (std::size_t i = 0; i < count; ++i) part.ids.push_back(static_cast<std::int64_t>(random() % (3 * bags)) - 7);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < part.bags() * part.dim(); ++i) part.grads.push_back(normal(random));
    made.push_back(std::move(part));
  }
  return made;
}

std::vector<Floats> read_together(const std::vector<Part>& all) {
  std::vector<Floats> outs;
  std::vector<TableRead> reads;
  for (const Part& part : all) outs.emplace_back(part.bags() * part.dim());
  for (std::size_t t = 0; t < all.size(); ++t) {
    reads.push_back({all[t].together.get(), all[t].ids, all[t].offsets, all[t].pooling, outs[t].data(), all[t].dim()});
  }
  monolith::lookup_many(reads);
  return outs;
}

TableUpdate update_of(const Part& part) {
  return {part.together.get(), part.ids, part.offsets, part.pooling, part.grads.data(), part.dim(), tables::options(kRate)};
}

void train_together(const std::vector<Part>& all) {
  std::vector<TableUpdate> updates;
  for (const Part& part : all) updates.push_back(update_of(part));
  monolith::apply_many(updates);
}

void check_same(const std::vector<Part>& all) {
  const auto outs = read_together(all);
  for (std::size_t t = 0; t < all.size(); ++t) {
    CHECK(same(outs[t], all[t].read_alone()));
    CHECK_EQ(all[t].together->size(), all[t].alone->size());
  }
}

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const monolith::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST("a request gives what calls of their own give") {
  for (const std::size_t threads : {1, 3}) {
    monolith::set_num_threads(threads);
    // Few ids; ids worth several threads; one table alone worth several.
    for (const auto& [tables, bags] : {std::pair<std::size_t, std::size_t>{7, 5}, {30, 200}, {2, 9000}}) {
      auto all = parts(tables, bags, tables);
      check_same(all);
      for (int step = 0; step < 2; ++step) {
        train_together(all);
        for (Part& part : all) part.train_alone();
        check_same(all);
      }
    }
  }
  monolith::set_num_threads(1);
}

TEST("a request may be empty") {
  monolith::lookup_many({});
  monolith::apply_many({});
}

TEST("vectors can lie side by side in rows of a larger array") {
  constexpr std::size_t kRows = 300, kTables = 20, kDim = 8;
  for (const std::size_t threads : {1, 3}) {
    monolith::set_num_threads(threads);
    std::vector<Part> all;
    std::mt19937_64 random(5);
    for (std::uint32_t t = 0; t < kTables; ++t) {
      Part part{make(t, kDim), make(t, kDim), {}, {}, Pooling::kSum, Floats(kRows * kDim)};
      for (std::size_t row = 0; row < kRows; ++row) part.ids.push_back(static_cast<std::int64_t>(random() % 500));
      for (float& grad : part.grads) grad = static_cast<float>(random() % 100) / 50 - 1;
      all.push_back(std::move(part));
    }
    Floats out(kRows * kTables * kDim), grads(out.size());
    std::vector<TableRead> reads;
    std::vector<TableUpdate> updates;
    for (std::size_t t = 0; t < kTables; ++t) {
      const std::size_t stride = kTables * kDim;
      for (std::size_t row = 0; row < kRows; ++row) {
        std::copy_n(all[t].grads.data() + row * kDim, kDim, grads.data() + row * stride + t * kDim);
      }
      reads.push_back({all[t].together.get(), all[t].ids, {}, Pooling::kSum, out.data() + t * kDim, stride});
      updates.push_back({all[t].together.get(), all[t].ids, {}, Pooling::kSum, grads.data() + t * kDim, stride, tables::options(kRate)});
    }
    for (int step = 0; step < 2; ++step) {
      monolith::lookup_many(reads);
      for (std::size_t t = 0; t < kTables; ++t) {
        Floats mine(kRows * kDim);
        for (std::size_t row = 0; row < kRows; ++row) {
          std::copy_n(out.data() + (row * kTables + t) * kDim, kDim, mine.data() + row * kDim);
        }
        CHECK(same(mine, all[t].read_alone()));
      }
      monolith::apply_many(updates);
      for (Part& part : all) part.train_alone();
    }
  }
  monolith::set_num_threads(1);
}

TEST("pooled vectors can lie apart, in a lookup and as gradients") {
  Part part{make(0, 4), make(0, 4), {1, 2, 3, 4, 5, 6}, {0, 3, 3, 6}, Pooling::kMean, Floats(12)};
  for (std::size_t i = 0; i < 12; ++i) part.grads[i] = static_cast<float>(i) - 5;
  Floats apart(3 * 10, 9.0f), grads(3 * 10, 7.0f);
  for (std::size_t bag = 0; bag < 3; ++bag) std::copy_n(part.grads.data() + bag * 4, 4, grads.data() + bag * 10);
  const TableUpdate update{part.together.get(), part.ids, part.offsets, part.pooling, grads.data(), 10, tables::options(kRate)};
  monolith::apply_many({&update, 1});
  part.train_alone();
  const TableRead read{part.together.get(), part.ids, part.offsets, part.pooling, apart.data(), 10};
  monolith::lookup_many({&read, 1});
  const Floats expected = part.read_alone();
  for (std::size_t bag = 0; bag < 3; ++bag) {
    for (std::size_t i = 0; i < 10; ++i) CHECK_EQ(apart[bag * 10 + i], i < 4 ? expected[bag * 4 + i] : 9.0f);
  }
}

TEST("a gradient that is the same for every bag needs one row") {
  Part part{make(0, 4), make(0, 4), {1, 2, 1, 3}, {}, Pooling::kSum, Floats(16, 0.5f)};
  const TableUpdate update{part.together.get(), part.ids, {}, Pooling::kSum, part.grads.data(), 0, tables::options(kRate)};
  monolith::apply_many({&update, 1});
  part.train_alone();
  std::vector<Part> all;
  all.push_back(std::move(part));
  check_same(all);
}

TEST("offsets can be cut out of those of a whole request") {
  const Ids ids = {1, 2, 3, 4, 5, 6, 7};
  const Ids splits = {0, 2, 3, 3, 7};  // two bags of the first table, two of the second
  auto first = make(0, 4), second = make(1, 4);
  const auto all = std::span<const std::int64_t>(ids);
  const auto cuts = std::span<const std::int64_t>(splits);
  Floats out(4 * 4), expected(4 * 4);
  const TableRead reads[] = {{first.get(), all.first(3), cuts.first(3), Pooling::kSum, out.data(), 4},
                             {second.get(), all.subspan(3), cuts.subspan(2), Pooling::kSum, out.data() + 8, 4}};
  monolith::lookup_many(reads);
  first->lookup_pooled(all.first(3), Ids{0, 2, 3}, Pooling::kSum, expected.data());
  second->lookup_pooled(all.subspan(3), Ids{0, 0, 4}, Pooling::kSum, expected.data() + 8);
  CHECK(same(out, expected));
}

TEST("a lookup that is wrong names the table and writes nothing") {
  auto all = parts(4, 10, 1);
  Ids wrong = all[2].offsets;
  wrong[1] = wrong.back() + 1;
  Floats out(10000, 3.0f);
  std::vector<TableRead> reads;
  for (const Part& part : all) {
    reads.push_back({part.together.get(), part.ids, part.offsets, part.pooling, out.data(), part.dim()});
  }
  reads[2].offsets = wrong;
  const std::string message = message_of([&] { monolith::lookup_many(reads); });
  CHECK(contains(message, "table 'table 2': offsets[2]"));
  CHECK(std::ranges::all_of(out, [](float x) { return x == 3.0f; }));
  // Too few, too many.
  for (const std::int64_t last : {std::int64_t{0}, all[2].offsets.back() + 1}) {
    wrong = {0, last};
    reads[2].offsets = wrong;
    CHECK(contains(message_of([&] { monolith::lookup_many(reads); }), "table 'table 2'"));
  }
}

TEST("an update that is wrong in its last table changes none") {
  auto all = parts(6, 20, 2);
  const auto refused = [&](const std::function<void(TableUpdate&)>& spoil, const std::string& expected) {
    std::vector<TableUpdate> updates;
    for (const Part& part : all) updates.push_back(update_of(part));
    spoil(updates.back());
    CHECK(contains(message_of([&] { monolith::apply_many(updates); }), expected));
    for (const Part& part : all) CHECK_EQ(part.together->size(), 0u);
  };
  const float negative = -1, none[1] = {};
  const Ids short_splits = {0, 1};
  refused([&](TableUpdate& update) { update.options.learning_rates = {&negative, 1}; }, "table 'table 5': learning_rates[0]");
  refused([&](TableUpdate& update) { update.options.learning_rates = {}; }, "table 'table 5': learning_rates");
  refused([&](TableUpdate& update) { update.options.step = -1; }, "table 'table 5': step");
  refused([&](TableUpdate& update) { update.offsets = short_splits; }, "table 'table 5': offsets");
  refused([&](TableUpdate& update) { update.table = all[0].together.get(); }, "table 'table 0': expected each table once");
  refused(
      [&](TableUpdate& update) {
        update.offsets = short_splits;
        update.ids = update.ids.first(1);
        update.options.snapshot = none;
      },
      "snapshot");
  auto serving = tables::config(monolith::OptimizerKind::kSgd, all[5].dim());
  serving.mode = monolith::Mode::kServing;
  serving.name = "served";
  Table table(serving);
  refused([&](TableUpdate& update) { update.table = &table; }, "table 'served' is a serving table");
}
