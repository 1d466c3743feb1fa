// Admission by chance must have the stated probability and repeat with the same seed: two workers with one seed and one stream
// must build the same table.
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/admission.h"

using monolith::ProbabilisticFilter;
using monolith::SlotThresholds;

namespace {

double admitted_share(ProbabilisticFilter& filter, std::uint32_t count, int n) {
  int admitted = 0;
  for (int i = 0; i < n; ++i) admitted += filter.admit(i, count);
  return static_cast<double>(admitted) / n;
}

}  // namespace

TEST("count / T without equal_probability, capped at 1") {
  ProbabilisticFilter filter(false, 1, SlotThresholds(5));
  CHECK_EQ(filter.probability(5, 1), 0.2);
  CHECK_EQ(filter.probability(5, 5), 1.0);
  CHECK_EQ(filter.probability(5, 500), 1.0);
  CHECK_NEAR(admitted_share(filter, 1, 100000), 0.2, 0.01);
  CHECK_NEAR(admitted_share(filter, 3, 100000), 0.6, 0.01);
  CHECK_EQ(admitted_share(filter, 5, 1000), 1.0);
}

TEST("1 - (1 - p)^count with p = 1 - 0.05^(1/T) otherwise: 95% are in after T occurrences") {
  ProbabilisticFilter filter(true, 1, SlotThresholds(5));
  const double p = 1 - std::pow(0.05, 1.0 / 5);
  CHECK_NEAR(filter.probability(5, 1), p, 1e-12);
  CHECK_NEAR(filter.probability(5, 3), 1 - std::pow(1 - p, 3), 1e-12);
  CHECK_NEAR(filter.probability(5, 5), 0.95, 1e-12);
  int inside = 0;
  for (int id = 0; id < 20000; ++id) {
    bool admitted = false;
    for (int occurrence = 0; occurrence < 5 && !admitted; ++occurrence) admitted = filter.admit(id, 1);
    inside += admitted;
  }
  CHECK_NEAR(inside / 20000.0, 0.95, 0.01);
}

TEST("the same seed and calls repeat, another seed differs, a threshold of 0 does not draw") {
  ProbabilisticFilter a(true, 7, SlotThresholds(4, {{2, 0}}));
  ProbabilisticFilter b(true, 7, SlotThresholds(4, {{2, 0}}));
  ProbabilisticFilter c(true, 8, SlotThresholds(4, {{2, 0}}));
  int different = 0;
  for (int i = 0; i < 1000; ++i) {
    const bool first = a.admit(i, 1);
    CHECK_EQ(first, b.admit(i, 1));
    different += first != c.admit(i, 1);
  }
  CHECK(different > 100);
  CHECK_EQ(a.draws(), 1000u);
  CHECK(a.admit(std::int64_t{2} << 48, 1));
  CHECK_EQ(a.draws(), 1000u);
}

TEST("an id that is offered again and again is not bound to its first answer") {
  ProbabilisticFilter filter(true, 3, SlotThresholds(100));
  int admitted = 0;
  for (int i = 0; i < 10000; ++i) admitted += filter.admit(42, 1);
  CHECK_NEAR(admitted / 10000.0, filter.probability(100, 1), 0.01);
}

TEST("a restored filter goes on with the draws it was saved at") {
  ProbabilisticFilter a(false, 5, SlotThresholds(3));
  for (int i = 0; i < 100; ++i) a.admit(i, 1);
  ProbabilisticFilter b(false, 5, SlotThresholds(3));
  b.restore(a.serialize());
  for (int i = 0; i < 1000; ++i) CHECK_EQ(a.admit(i, 1), b.admit(i, 1));
}

TEST("threads draw different numbers and none is used twice") {
  ProbabilisticFilter filter(true, 5, SlotThresholds(3));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<std::int64_t> ids(1000, 1);
      const auto out = std::make_unique<bool[]>(ids.size());
      filter.admit(ids, {}, {out.get(), ids.size()});
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(filter.draws(), 4000u);
}
