// An owner answers messages of other ranks, and steps its rows with their gradients. A gradient that is lost, counted twice or added in
// another order makes ranks train another model than one process; a message that is put together wrongly must not reach memory.
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/rank_exchange.h"
#include "tables.h"

using monolith::Table;
using Floats = std::vector<float>;
using Ids = std::vector<std::int64_t>;
using Messages = std::vector<std::span<const std::int64_t>>;
using Gradients = std::vector<std::span<const float>>;

namespace {

constexpr float kRates[] = {0.5f, 0.25f};

std::unique_ptr<Table> make(const char* name, std::uint32_t dim, std::shared_ptr<monolith::AdmissionFilter> admission = nullptr) {
  auto config = tables::config(monolith::OptimizerKind::kAdagrad, dim);
  config.name = name;
  return std::make_unique<Table>(config, admission);
}

struct Pair {
  std::unique_ptr<Table> one = make("one", 3), two = make("two", 2);
  std::vector<Table*> tables{one.get(), two.get()};
  std::vector<const Table*> read{one.get(), two.get()};
};

monolith::UpdateOptions options(bool sequential = false) {
  monolith::UpdateOptions options;
  options.learning_rates = kRates;
  options.event_time = 77;
  options.sequential = sequential;
  return options;
}

Floats rows_of(const Table& table, const Ids& ids) {
  Floats rows(ids.size() * table.dim());
  table.lookup(ids, rows.data());
  return rows;
}

std::string message_of(const auto& f) {
  try {
    f();
  } catch (const monolith::InvalidArgument& error) {
    return error.what();
  }
  return "";
}

// Table 1 with ids 5 and 6, then table 0 with 5 and 7: neither all tables nor their order are fixed.
const Ids kFirst{9, 2, 1, 2, 0, 2, 5, 6, 5, 7};
const Ids kSecond{9, 1, 0, 3, 7, 8, 5};
const Ids kNothing{9, 0};

}  // namespace

TEST("rows come message by message, in the order of its ids") {
  Pair pair;
  const Messages messages{kFirst, kNothing, kSecond};
  Floats out(100, -1.0f);
  const auto ends = monolith::lookup_messages(pair.read, messages, out);
  CHECK((ends == std::vector<std::size_t>{10, 10, 19}));
  Floats expected = rows_of(*pair.two, {5, 6});
  for (const float x : rows_of(*pair.one, {5, 7, 7, 8, 5})) expected.push_back(x);
  CHECK(Floats(out.begin(), out.begin() + 19) == expected);
  CHECK_EQ(out[19], -1.0f);
}

TEST("a buffer that is too small is left alone, and the size it should have is told") {
  Pair pair;
  const Messages messages{kFirst, kSecond};
  Floats out(18, -1.0f);
  CHECK_EQ(monolith::lookup_messages(pair.read, messages, out).back(), 19u);
  CHECK(out == Floats(18, -1.0f));
}

TEST("gradients of all messages make one step, added in the order of the messages") {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  Floats first(10), second(9);
  for (float& x : first) x = normal(random);
  for (float& x : second) x = normal(random);
  for (const bool sequential : {false, true}) {
    Pair pair, expected;
    monolith::apply_messages(pair.tables, Messages{kFirst, kNothing, kSecond}, Gradients{first, {}, second}, options(sequential));
    Floats grads(first.begin() + 4, first.end());
    grads.insert(grads.end(), second.begin(), second.end());
    auto mine = options(sequential);
    mine.learning_rates = {kRates, 1};
    expected.one->apply_gradients(Ids{5, 7, 7, 8, 5}, grads.data(), mine);
    mine.learning_rates = {kRates + 1, 1};
    expected.two->apply_gradients(Ids{5, 6}, first.data(), mine);
    for (const Ids& ids : {Ids{5, 6, 7, 8}}) {
      CHECK(rows_of(*pair.one, ids) == rows_of(*expected.one, ids));
      CHECK(rows_of(*pair.two, ids) == rows_of(*expected.two, ids));
    }
    CHECK_EQ(pair.one->size(), 3u);
    CHECK_EQ(pair.one->max_event_time(), 77u);
  }
}

TEST("a table that is named without ids sees the step, one that is not named does not") {
  Pair pair;
  const Ids named{9, 1, 1, 0};
  monolith::apply_messages(pair.tables, Messages{named}, Gradients{{}}, options());
  CHECK_EQ(pair.two->state().updates, 1u);
  CHECK_EQ(pair.two->max_event_time(), 77u);
  CHECK_EQ(pair.one->state().updates, 0u);
}

TEST("an admission filter counts what was summed, and that of all messages") {
  const auto filter = std::make_shared<monolith::SlidingFilter>(1000, 7, monolith::SlotThresholds(5, {}));
  const auto table = make("filtered", 1, filter);
  const std::vector<Table*> tables{table.get()};
  const Ids message{9, 1, 0, 3, 1, 2, 3, 4, 5, 2}, again{9, 1, 0, 1, 3, 2};
  const Floats grads{1, 1, 1}, one{1};
  auto mine = options();
  mine.learning_rates = {kRates, 1};
  monolith::apply_messages(tables, Messages{message, again}, Gradients{grads, one}, mine);
  CHECK_EQ(table->size(), 0u);  // none had come before
  CHECK_EQ(filter->get(1), 4u);
  CHECK_EQ(filter->get(2), 5u);
  CHECK_EQ(filter->get(3), 4u);
  const Ids once{9, 1, 0, 3, 1, 2, 3, 1, 1, 1};
  monolith::apply_messages(tables, Messages{once}, Gradients{grads}, mine);
  bool found[3];
  table->contains(Ids{1, 2, 3}, found);
  CHECK(!found[0]);
  CHECK(found[1]);
  CHECK(!found[2]);
}

TEST("an id that is said to have come more often than can be counted, and one that came never") {
  const auto filter = std::make_shared<monolith::SlidingFilter>(1000, 7, monolith::SlotThresholds(5, {}));
  const auto table = make("filtered", 1, filter);
  const std::vector<Table*> tables{table.get()};
  auto mine = options();
  mine.learning_rates = {kRates, 1};
  const Floats one{1};
  const Ids often{9, 1, 0, 1, 3, INT64_MAX}, never{9, 1, 0, 1, 4, 0};
  monolith::apply_messages(tables, Messages{often, often}, Gradients{one, one}, mine);
  monolith::apply_messages(tables, Messages{often}, Gradients{one}, mine);
  CHECK_EQ(table->size(), 1u);
  CHECK(message_of([&] { monolith::apply_messages(tables, Messages{never}, Gradients{one}, mine); })
            .find("it says that an id occurred 0 times") != std::string::npos);
}

TEST("messages that are put together wrongly are refused before anything has changed") {
  Pair pair;
  Floats out(100);
  const auto refused = [&](Ids message, const std::string& why) {
    CHECK(message_of([&] { monolith::lookup_messages(pair.read, Messages{kFirst, message}, out); }).find(why) != std::string::npos);
    const Floats grads(10);
    const auto apply = [&] { monolith::apply_messages(pair.tables, Messages{kFirst, message}, Gradients{grads, {}}, options()); };
    CHECK(message_of(apply).find(why) != std::string::npos);
    CHECK_EQ(pair.one->size() + pair.two->size(), 0u);
  };
  refused({}, "it has no head");
  refused({9, -1}, "it names -1 tables");
  refused({9, 1, 0}, "it names 1 tables, which it is too short for");
  refused({9, 1, 2, 0}, "it names table 2 of 2");
  refused({9, 1, -1, 0}, "it names table -1 of 2");
  refused({9, 1, 0, 2, 5}, "it has fewer ids than it says");
  refused({9, 1, 0, -1, 5}, "it has fewer ids than it says");
  refused({9, 1, 0, 1, 5, 6}, "it has more ids than it says");
  refused({9, INT64_MAX, 0, 1}, "it is too short for");
  const Floats short_grads(9), whole(10);
  CHECK(message_of([&] { monolith::apply_messages(pair.tables, Messages{kFirst}, Gradients{short_grads}, options()); })
            .find("expected 10 floats of gradients, got 9") != std::string::npos);
  CHECK(message_of([&] { monolith::apply_messages(pair.tables, Messages{kFirst}, Gradients{}, options()); }).starts_with("grads:"));
  auto fewer = options();
  fewer.learning_rates = {kRates, 1};
  CHECK(message_of([&] { monolith::apply_messages(pair.tables, Messages{kFirst}, Gradients{whole}, fewer); })
            .starts_with("learning_rates: expected one per segment of every table"));
  CHECK_EQ(pair.one->size() + pair.two->size(), 0u);
}

TEST("no damage to a message makes its reader leave it") {
  Pair pair;
  std::mt19937_64 random(5);
  const std::int64_t values[] = {0, 1, -1, 2, 3, INT64_MAX, INT64_MIN, 1ll << 32, 1ll << 61};
  for (int round = 0; round < 2000; ++round) {
    Ids message = kFirst;
    if (round % 3 == 0) message.resize(random() % message.size());
    for (std::uint64_t n = random() % 3 + 1; n > 0 && !message.empty(); --n) message[random() % message.size()] = values[random() % 9];
    message.shrink_to_fit();
    Floats out(10);
    message_of([&] { monolith::lookup_messages(pair.read, Messages{message}, out); });
    message_of([&] { monolith::apply_messages(pair.tables, Messages{message}, Gradients{out}, options()); });
  }
}

TEST("stochastic rounding draws by id and update, wherever in the call an id is and whoever sent it") {
  auto config = tables::config(monolith::OptimizerKind::kSgd, 8);
  config.segments[0].precision = monolith::Precision::kBf16;
  config.segments[0].stochastic_rounding = true;
  std::mt19937_64 random(3);
  std::uniform_real_distribution<float> uniform(-1, 1);
  Ids ids(200);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i) * 31;
  Floats grads(ids.size() * 8);
  for (float& x : grads) x = uniform(random);
  auto mine = options();
  mine.learning_rates = {kRates, 1};

  // All at once, and the ids that each of two owners would have, the last first.
  Table whole(config), odd(config), even(config);
  for (int step = 0; step < 3; ++step) {
    whole.apply_gradients(ids, grads.data(), mine);
    for (const std::size_t parity : {0u, 1u}) {
      Ids some;
      Floats some_grads;
      for (std::size_t i = ids.size(); i-- > 0;) {
        if (i % 2 != parity) continue;
        some.push_back(ids[i]);
        some_grads.insert(some_grads.end(), grads.begin() + static_cast<std::ptrdiff_t>(i * 8),
                          grads.begin() + static_cast<std::ptrdiff_t>(i * 8 + 8));
      }
      (parity == 0 ? even : odd).apply_gradients(some, some_grads.data(), mine);
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    CHECK(rows_of(i % 2 == 0 ? even : odd, {ids[i]}) == rows_of(whole, {ids[i]}));
  }
}
