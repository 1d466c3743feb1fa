// The update formulas. Included only by kernels.cc, once per instruction set.
// w weights, s the segment's state in slot order, g the gradient, n the dim, lr the learning rate of the call.
#pragma once

#include "kernels/kernels.h"

namespace monolith {
namespace MONOLITH_ISA {
namespace {

inline float root(float x) { return __builtin_sqrtf(x); }

inline float sign_of(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }

struct Sgd {
  static void init(const Optimizer&, float*, std::uint32_t) {}
  static void step(const Optimizer&, const StepContext& c, float* __restrict w, float* __restrict,
                   const float* __restrict g, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) w[i] -= c.learning_rate * g[i];
  }
};

struct Momentum {
  static void init(const Optimizer&, float* s, std::uint32_t n) { __builtin_memset(s, 0, n * sizeof(float)); }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) {
      const float next = o.momentum * s[i] - c.learning_rate * (g[i] + o.weight_decay * w[i]);
      w[i] += o.nesterov ? (1 + o.momentum) * next - o.momentum * s[i] : next;
      s[i] = next;
    }
  }
};

struct Adagrad {
  static void init(const Optimizer& o, float* s, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) s[i] = o.initial_accumulator;
  }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    const float decay = o.decouple_weight_decay ? 0 : o.weight_decay;
    const float decoupled = o.decouple_weight_decay ? c.learning_rate * o.weight_decay : 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + decay * w[i];
      s[i] += decayed * decayed;
      w[i] -= c.learning_rate * decayed / root(s[i]) + decoupled * w[i];
    }
  }
};

struct RowwiseAdagrad {
  static void init(const Optimizer& o, float* s, std::uint32_t) { s[0] = o.initial_accumulator; }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    float sum = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + o.weight_decay * w[i];
      sum += decayed * decayed;
    }
    s[0] += sum / static_cast<float>(n);
    const float rate = c.learning_rate / (root(s[0]) + o.epsilon);
    for (std::uint32_t i = 0; i < n; ++i) w[i] -= rate * (g[i] + o.weight_decay * w[i]);
  }
};

struct Adadelta {
  static void init(const Optimizer&, float* s, std::uint32_t n) { __builtin_memset(s, 0, 2 * n * sizeof(float)); }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    const float rho = o.momentum;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + o.weight_decay * w[i];
      const float accum = rho * s[i] + (1 - rho) * decayed * decayed;
      const float update = root(s[n + i] + o.epsilon) / root(accum + o.epsilon) * decayed;
      w[i] -= c.learning_rate * update;
      s[i] = accum;
      s[n + i] = rho * s[n + i] + (1 - rho) * update * update;
    }
  }
};

template <bool kMax>
struct AdamFamily {
  static constexpr std::uint32_t kVectors = kMax ? 3 : 2;
  static void init(const Optimizer& o, float* s, std::uint32_t n) {
    __builtin_memset(s, 0, kVectors * n * sizeof(float));
    s[kVectors * n] = o.beta1;
    s[kVectors * n + 1] = o.beta2;
  }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    float* __restrict m = s;
    float* __restrict v = s + n;
    float* __restrict vhat = s + 2 * n;
    float* __restrict powers = s + kVectors * n;
    const float rate = c.learning_rate * root(1 - powers[1]) / (1 - powers[0]);
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + o.weight_decay * w[i];
      m[i] += (decayed - m[i]) * (1 - o.beta1);
      v[i] += (decayed * decayed - v[i]) * (1 - o.beta2);
      float second = v[i];
      if constexpr (kMax) {
        second = vhat[i] > v[i] ? vhat[i] : v[i];
        vhat[i] = second;
      }
      const float numerator = o.nesterov ? (1 - o.beta1) * decayed + o.beta1 * m[i] : m[i];
      w[i] -= rate * numerator / (root(second) + o.epsilon);
    }
    powers[0] *= o.beta1;
    powers[1] *= o.beta2;
  }
};

struct Adamom {
  static void init(const Optimizer&, float* s, std::uint32_t n) { __builtin_memset(s, 0, (2 * n + 1) * sizeof(float)); }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    float* __restrict m = s;
    float* __restrict v = s + n;
    const float count = o.beta2 * s[2 * n] + 1;
    s[2 * n] = count;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + o.weight_decay * w[i];
      m[i] = o.momentum * m[i] + (1 - o.momentum) * decayed;
      v[i] = o.beta2 * v[i] + decayed * decayed;
      w[i] -= c.learning_rate * m[i] / root(v[i] / count + o.epsilon);
    }
  }
};

template <bool kV2>
struct RmspropFamily {
  static void init(const Optimizer&, float* s, std::uint32_t n) { __builtin_memset(s, 0, n * sizeof(float)); }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    const float fresh = kV2 ? 1 : 1 - o.momentum;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + o.weight_decay * w[i];
      s[i] = o.momentum * s[i] + fresh * decayed * decayed;
      w[i] -= c.learning_rate / (root(s[i]) + 1) * decayed;
    }
  }
};

struct Ftrl {
  static void init(const Optimizer& o, float* s, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) s[i] = 0;
    for (std::uint32_t i = 0; i < n; ++i) s[n + i] = o.initial_accumulator;
  }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    float* __restrict zero = s;
    float* __restrict norm = s + n;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float next = norm[i] + g[i] * g[i];
      zero[i] += g[i] - (root(next) - root(norm[i])) / c.learning_rate * w[i];
      norm[i] = next;
      const float z = zero[i];
      const float denominator = root(next) + o.beta1 + o.l2 * c.learning_rate;
      const float moved = c.learning_rate * (sign_of(z) * o.l1 - z) / denominator;
      w[i] = (z < 0 ? -z : z) <= o.l1 ? 0 : moved;
    }
  }
};

struct GroupFtrl {
  static void init(const Optimizer& o, float* s, std::uint32_t n) { Ftrl::init(o, s, n); }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    float* __restrict zero = s;
    float* __restrict norm = s + n;
    float square = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float next = norm[i] + g[i] * g[i];
      zero[i] += g[i] - (root(next) - root(norm[i])) / c.learning_rate * w[i];
      norm[i] = next;
      square += zero[i] * zero[i];
    }
    const float length = root(square);
    // A zero vector has no direction to shrink along: the weights are zero, as below l1.
    if (length < o.l1 || length == 0) {
      for (std::uint32_t i = 0; i < n; ++i) w[i] = 0;
      return;
    }
    const float factor = c.learning_rate * (o.l1 - length) / length;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float denominator = o.beta1 + root(norm[i]) + o.l2 * c.learning_rate;
      w[i] = denominator > 0 ? factor * zero[i] / denominator : 0;  // an element that has never seen a gradient
    }
  }
};

struct GroupAdagrad {
  static void init(const Optimizer& o, float* s, std::uint32_t) { s[0] = o.initial_accumulator; }
  static void step(const Optimizer& o, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict g, std::uint32_t n) {
    float largest = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float decayed = g[i] + o.weight_decay * w[i];
      largest = decayed * decayed > largest ? decayed * decayed : largest;
    }
    s[0] += largest;
    const float divisor = o.beta1 + root(s[0]);
    // From an accumulator of 0, before the first gradient that is not 0: an infinite rate, which would set the row to 0.
    if (divisor == 0) return;
    const float rate = c.learning_rate / divisor;
    float square = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      const float z = g[i] + o.weight_decay * w[i] - w[i] / rate;
      square += z * z;
    }
    const float length = root(square);
    // With l2 = 0 and z = 0 the shrink factor would be 0 / 0 and the row NaN for ever.
    if (length < o.l2 || length == 0) {
      for (std::uint32_t i = 0; i < n; ++i) w[i] = 0;
      return;
    }
    const float factor = -rate * (length - o.l2) / length;
    for (std::uint32_t i = 0; i < n; ++i) w[i] = factor * (g[i] + o.weight_decay * w[i] - w[i] / rate);
  }
};

struct MovingAverage {
  static void init(const Optimizer&, float*, std::uint32_t) {}
  static void step(const Optimizer& o, const StepContext&, float* __restrict w, float* __restrict,
                   const float* __restrict g, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) w[i] = o.momentum * w[i] + (1 - o.momentum) * g[i];
  }
};

struct BatchSoftmax {
  static void init(const Optimizer&, float* s, std::uint32_t) { __builtin_memset(s, 0, sizeof(std::int64_t)); }
  static void step(const Optimizer&, const StepContext& c, float* __restrict w, float* __restrict s,
                   const float* __restrict, std::uint32_t) {
    std::int64_t last;
    __builtin_memcpy(&last, s, sizeof(last));
    w[0] = (1 - c.learning_rate) * w[0] + c.learning_rate * static_cast<float>(c.step - last);
    __builtin_memcpy(s, &c.step, sizeof(last));
  }
};

// Calls f with the optimizer's type; the only place that lists them.
template <typename F>
inline void with_optimizer(OptimizerKind kind, F&& f) {
  switch (kind) {
    case OptimizerKind::kSgd: return f(Sgd{});
    case OptimizerKind::kMomentum: return f(Momentum{});
    case OptimizerKind::kAdagrad:
    case OptimizerKind::kDynamicWdAdagrad: return f(Adagrad{});
    case OptimizerKind::kRowwiseAdagrad: return f(RowwiseAdagrad{});
    case OptimizerKind::kAdadelta: return f(Adadelta{});
    case OptimizerKind::kAdam: return f(AdamFamily<false>{});
    case OptimizerKind::kAmsgrad: return f(AdamFamily<true>{});
    case OptimizerKind::kAdamom: return f(Adamom{});
    case OptimizerKind::kRmsprop: return f(RmspropFamily<false>{});
    case OptimizerKind::kRmspropV2: return f(RmspropFamily<true>{});
    case OptimizerKind::kFtrl: return f(Ftrl{});
    case OptimizerKind::kGroupFtrl: return f(GroupFtrl{});
    case OptimizerKind::kGroupAdagrad: return f(GroupAdagrad{});
    case OptimizerKind::kMovingAverage: return f(MovingAverage{});
    case OptimizerKind::kBatchSoftmax: return f(BatchSoftmax{});
  }
}

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
