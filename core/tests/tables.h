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

// The id whose hash is `hash`: each step of hash_id undone. Lets a test choose where ids fall.
inline std::int64_t id_with_hash(std::uint64_t hash) {
  const auto unshift = [](std::uint64_t x, int by) {
    std::uint64_t result = x;
    for (int done = by; done < 64; done += by) result = x ^ (result >> by);
    return result;
  };
  const auto inverse = [](std::uint64_t odd) {
    std::uint64_t x = odd;
    for (int i = 0; i < 6; ++i) x *= 2 - odd * x;
    return x;
  };
  std::uint64_t x = unshift(hash, 31) * inverse(0x94D049BB133111EBull);
  x = unshift(x, 27) * inverse(0xBF58476D1CE4E5B9ull);
  return static_cast<std::int64_t>(unshift(x, 30) - 0x9E3779B97F4A7C15ull);
}

}  // namespace tables
