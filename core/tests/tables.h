// Small tables for the tests of the core.
#pragma once

#include <cstdint>
#include <vector>

#include "monolith/table.h"

namespace tables {

inline monolith::TableConfig config(monolith::OptimizerKind kind = monolith::OptimizerKind::kSgd, std::uint32_t dim = 4) {
  monolith::TableConfig config;
  config.name = "test";
  monolith::Segment segment;
  segment.dim = dim;
  segment.optimizer.kind = kind;
  segment.optimizer.initial_accumulator = 0.1f;
  segment.optimizer.momentum = 0.9f;
  segment.optimizer.beta1 = 0.9f;
  segment.optimizer.beta2 = 0.99f;
  segment.optimizer.epsilon = 0.01f;
  config.segments = {segment};
  return config;
}

inline monolith::UpdateOptions options(const float& rate) {
  monolith::UpdateOptions options;
  options.learning_rates = {&rate, 1};
  return options;
}

}  // namespace tables
