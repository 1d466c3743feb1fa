// Hyperparameters are exchanged under rows that other threads read: every lookup must see whole rows and either plan. Meant to
// run under TSan.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "monolith/error.h"
#include "monolith/table.h"

namespace {

monolith::TableConfig config_of(float initial, float weight_decay) {
  monolith::TableConfig config;
  config.name = "t";
  monolith::Segment segment;
  segment.dim = 4;
  segment.initializer = {monolith::InitializerKind::kConstant, initial, 0};
  segment.optimizer.kind = monolith::OptimizerKind::kSgd;
  segment.optimizer.weight_decay = weight_decay;
  config.segments.push_back(segment);
  return config;
}

}  // namespace

TEST("lookups run while it is reconfigured") {
  monolith::Table table(config_of(1, 0));
  std::vector<std::int64_t> ids(2000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  const std::vector<float> rows(ids.size() / 2 * 4, 7.0f);
  table.assign({ids.data(), ids.size() / 2}, rows.data(), 0);
  std::atomic<bool> done{false};
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 2; ++reader) {
    readers.emplace_back([&] {
      std::vector<float> out(ids.size() * 4);
      while (!done) {
        table.lookup(ids, out.data());
        for (std::size_t i = 0; i < out.size(); ++i) {
          const bool fits = i < out.size() / 2 ? out[i] == 7 : out[i] == 1 || out[i] == 2;
          if (!fits) ++wrong;
        }
      }
    });
  }
  for (int round = 0; round < 200; ++round) table.reconfigure(config_of(round % 2 == 0 ? 2 : 1, 0.5f), nullptr);
  done = true;
  for (auto& reader : readers) reader.join();
  CHECK_EQ(wrong.load(), 0);
}

TEST("other rows are refused and nothing changes") {
  monolith::Table table(config_of(1, 0));
  auto wider = config_of(2, 0);
  wider.segments[0].dim = 5;
  CHECK_THROWS(table.reconfigure(wider, nullptr), monolith::InvalidArgument);
  const std::vector<std::int64_t> ids{3};
  std::vector<float> out(4);
  table.lookup(ids, out.data());
  CHECK_EQ(out[0], 1.0f);
}
