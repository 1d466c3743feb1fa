// Every optimizer against its formula, written down a second time in double precision. A sign, a slot or a decay that is wrong
// still trains something, so no error would be seen elsewhere.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "check.h"
#include "tables.h"

namespace {

using monolith::Optimizer;
using monolith::OptimizerKind;
using Vector = std::vector<double>;

constexpr std::uint32_t kDim = 5;
constexpr int kSteps = 6;
constexpr float kRate = 0.07f;
constexpr std::int64_t kId = 42;
constexpr float kStart = 0.4f;

// The rows of one optimizer in the same memory from step to step, as the formula likes it.
struct Reference {
  Vector w = Vector(kDim, kStart);
  Vector a = Vector(kDim, 0), b = Vector(kDim, 0), c = Vector(kDim, 0);
  double x = 0, y = 0;
};
using Step = std::function<void(Reference&, const Optimizer&, const Vector& g, int step)>;

double sign(double x) { return x > 0 ? 1 : x < 0 ? -1 : 0; }

Vector gradient(int step) {
  Vector g(kDim);
  for (std::uint32_t i = 0; i < kDim; ++i) g[i] = static_cast<float>(std::sin(1.7 * step + i) * (i == 3 ? 0.01 : 1.0));
  return g;
}

void follows(const Optimizer& optimizer, Reference reference, const Step& formula) {
  auto config = tables::config(optimizer.kind, kDim);
  config.segments[0].optimizer = optimizer;
  config.segments[0].initializer = {monolith::InitializerKind::kConstant, kStart, 0};
  monolith::Table table(config);
  const std::int64_t ids[] = {kId};
  for (int step = 0; step < kSteps; ++step) {
    const Vector g = gradient(step);
    const std::vector<float> grads(g.begin(), g.end());
    auto options = tables::options(kRate);
    options.step = step;
    table.apply_gradients(ids, grads.data(), options);
    formula(reference, optimizer, g, step);
    std::vector<float> w(kDim);
    table.lookup(ids, w.data());
    for (std::uint32_t i = 0; i < kDim; ++i) {
      REQUIRE(std::isfinite(w[i]));
      REQUIRE(std::abs(w[i] - reference.w[i]) <= 2e-5 * (1 + std::abs(reference.w[i])));
    }
  }
}

Optimizer make(OptimizerKind kind) {
  Optimizer optimizer;
  optimizer.kind = kind;
  return optimizer;
}

}  // namespace

TEST("sgd") {
  follows(make(OptimizerKind::kSgd), {}, [](Reference& r, const Optimizer&, const Vector& g, int) {
    for (std::uint32_t i = 0; i < kDim; ++i) r.w[i] -= kRate * g[i];
  });
}

TEST("momentum, plain and Nesterov, with weight decay") {
  for (const bool nesterov : {false, true}) {
    Optimizer o = make(OptimizerKind::kMomentum);
    o.momentum = 0.9f;
    o.weight_decay = 0.02f;
    o.nesterov = nesterov;
    follows(o, {}, [](Reference& r, const Optimizer& o, const Vector& g, int) {
      for (std::uint32_t i = 0; i < kDim; ++i) {
        const double before = r.a[i];
        r.a[i] = o.momentum * before - kRate * (g[i] + o.weight_decay * r.w[i]);
        r.w[i] += o.nesterov ? r.a[i] + o.momentum * (r.a[i] - before) : r.a[i];
      }
    });
  }
}

TEST("adagrad, with weight decay as part of the gradient and apart from it") {
  for (const OptimizerKind kind : {OptimizerKind::kAdagrad, OptimizerKind::kDynamicWdAdagrad}) {
    for (const bool decoupled : {false, true}) {
      Optimizer o = make(kind);
      o.initial_accumulator = 0.1f;
      o.weight_decay = 0.03f;
      o.decouple_weight_decay = decoupled;
      Reference start;
      start.a.assign(kDim, o.initial_accumulator);
      follows(o, start, [](Reference& r, const Optimizer& o, const Vector& g, int) {
        for (std::uint32_t i = 0; i < kDim; ++i) {
          const double decayed = g[i] + (o.decouple_weight_decay ? 0 : o.weight_decay * r.w[i]);
          r.a[i] += decayed * decayed;
          const double apart = o.decouple_weight_decay ? kRate * o.weight_decay * r.w[i] : 0;
          r.w[i] -= kRate * decayed / std::sqrt(r.a[i]) + apart;
        }
      });
    }
  }
}

TEST("row-wise adagrad: one accumulator for the mean square") {
  Optimizer o = make(OptimizerKind::kRowwiseAdagrad);
  o.initial_accumulator = 0.1f;
  o.weight_decay = 0.01f;
  o.epsilon = 1e-3f;
  Reference start;
  start.x = o.initial_accumulator;
  follows(o, start, [](Reference& r, const Optimizer& o, const Vector& g, int) {
    double mean = 0;
    for (std::uint32_t i = 0; i < kDim; ++i) mean += std::pow(g[i] + o.weight_decay * r.w[i], 2) / kDim;
    r.x += mean;
    for (std::uint32_t i = 0; i < kDim; ++i) {
      r.w[i] -= kRate * (g[i] + o.weight_decay * r.w[i]) / (std::sqrt(r.x) + o.epsilon);
    }
  });
}

TEST("adadelta") {
  Optimizer o = make(OptimizerKind::kAdadelta);
  o.momentum = 0.9f;
  o.epsilon = 0.01f;
  o.weight_decay = 0.02f;
  follows(o, {}, [](Reference& r, const Optimizer& o, const Vector& g, int) {
    for (std::uint32_t i = 0; i < kDim; ++i) {
      const double decayed = g[i] + o.weight_decay * r.w[i];
      r.a[i] = o.momentum * r.a[i] + (1 - o.momentum) * decayed * decayed;
      const double update = std::sqrt(r.b[i] + o.epsilon) / std::sqrt(r.a[i] + o.epsilon) * decayed;
      r.b[i] = o.momentum * r.b[i] + (1 - o.momentum) * update * update;
      r.w[i] -= kRate * update;
    }
  });
}

TEST("adam and amsgrad, plain and Nesterov: bias correction by the number of steps of the row") {
  for (const bool largest : {false, true}) {
    for (const bool nesterov : {false, true}) {
      Optimizer o = make(largest ? OptimizerKind::kAmsgrad : OptimizerKind::kAdam);
      o.beta1 = 0.9f;
      o.beta2 = 0.99f;
      o.epsilon = 0.01f;
      o.weight_decay = 0.02f;
      o.nesterov = nesterov;
      follows(o, {}, [largest](Reference& r, const Optimizer& o, const Vector& g, int step) {
        const double rate = kRate * std::sqrt(1 - std::pow(o.beta2, step + 1)) / (1 - std::pow(o.beta1, step + 1));
        for (std::uint32_t i = 0; i < kDim; ++i) {
          const double decayed = g[i] + o.weight_decay * r.w[i];
          r.a[i] = o.beta1 * r.a[i] + (1 - o.beta1) * decayed;
          r.b[i] = o.beta2 * r.b[i] + (1 - o.beta2) * decayed * decayed;
          r.c[i] = largest ? std::max(r.c[i], r.b[i]) : r.b[i];
          const double first = o.nesterov ? o.beta1 * r.a[i] + (1 - o.beta1) * decayed : r.a[i];
          r.w[i] -= rate * first / (std::sqrt(r.c[i]) + o.epsilon);
        }
      });
    }
  }
}

TEST("adamom: the second moment is divided by a decayed count") {
  Optimizer o = make(OptimizerKind::kAdamom);
  o.momentum = 0.9f;
  o.beta2 = 0.99f;
  o.epsilon = 0.01f;
  o.weight_decay = 0.01f;
  follows(o, {}, [](Reference& r, const Optimizer& o, const Vector& g, int) {
    r.x = o.beta2 * r.x + 1;
    for (std::uint32_t i = 0; i < kDim; ++i) {
      const double decayed = g[i] + o.weight_decay * r.w[i];
      r.a[i] = o.momentum * r.a[i] + (1 - o.momentum) * decayed;
      r.b[i] = o.beta2 * r.b[i] + decayed * decayed;
      r.w[i] -= kRate * r.a[i] / std::sqrt(r.b[i] / r.x + o.epsilon);
    }
  });
}

TEST("rmsprop and its second version, which does not scale the new square") {
  for (const bool second : {false, true}) {
    Optimizer o = make(second ? OptimizerKind::kRmspropV2 : OptimizerKind::kRmsprop);
    o.momentum = 0.9f;
    o.weight_decay = 0.02f;
    follows(o, {}, [second](Reference& r, const Optimizer& o, const Vector& g, int) {
      for (std::uint32_t i = 0; i < kDim; ++i) {
        const double decayed = g[i] + o.weight_decay * r.w[i];
        r.a[i] = o.momentum * r.a[i] + (second ? 1 : 1 - o.momentum) * decayed * decayed;
        r.w[i] -= kRate * decayed / (std::sqrt(r.a[i]) + 1);
      }
    });
  }
}

TEST("ftrl: weights within l1 are exactly zero") {
  for (const float l1 : {0.0f, 0.3f}) {
    Optimizer o = make(OptimizerKind::kFtrl);
    o.initial_accumulator = 0.1f;
    o.beta1 = 1;
    o.l1 = l1;
    o.l2 = 0.1f;
    Reference start;
    start.b.assign(kDim, o.initial_accumulator);
    follows(o, start, [](Reference& r, const Optimizer& o, const Vector& g, int) {
      for (std::uint32_t i = 0; i < kDim; ++i) {
        const double before = r.b[i];
        r.b[i] += g[i] * g[i];
        r.a[i] += g[i] - (std::sqrt(r.b[i]) - std::sqrt(before)) / kRate * r.w[i];
        const double moved = (sign(r.a[i]) * o.l1 - r.a[i]) / ((std::sqrt(r.b[i]) + o.beta1) / kRate + o.l2);
        r.w[i] = std::abs(r.a[i]) <= o.l1 ? 0 : moved;
      }
    });
  }
}

TEST("group ftrl: the row is zero as a whole or not at all") {
  for (const float l1 : {0.1f, 1.0f}) {
    Optimizer o = make(OptimizerKind::kGroupFtrl);
    o.initial_accumulator = 0.1f;
    o.beta1 = 1;
    o.l1 = l1;
    o.l2 = 0.1f;
    Reference start;
    start.b.assign(kDim, o.initial_accumulator);
    follows(o, start, [](Reference& r, const Optimizer& o, const Vector& g, int) {
      double square = 0;
      for (std::uint32_t i = 0; i < kDim; ++i) {
        const double before = r.b[i];
        r.b[i] += g[i] * g[i];
        r.a[i] += g[i] - (std::sqrt(r.b[i]) - std::sqrt(before)) / kRate * r.w[i];
        square += r.a[i] * r.a[i];
      }
      const double length = std::sqrt(square);
      for (std::uint32_t i = 0; i < kDim; ++i) {
        const double shrunk = (o.l1 - length) / length * r.a[i] / ((o.beta1 + std::sqrt(r.b[i])) / kRate + o.l2);
        r.w[i] = length < o.l1 ? 0 : shrunk;
      }
    });
  }
}

TEST("group adagrad: one accumulator for the largest square, and l2 shrinks the row") {
  Optimizer o = make(OptimizerKind::kGroupAdagrad);
  o.initial_accumulator = 0.1f;
  o.beta1 = 0.5f;
  o.l2 = 0.2f;
  o.weight_decay = 0.01f;
  Reference start;
  start.x = o.initial_accumulator;
  follows(o, start, [](Reference& r, const Optimizer& o, const Vector& g, int) {
    double largest = 0, square = 0;
    for (std::uint32_t i = 0; i < kDim; ++i) largest = std::max(largest, std::pow(g[i] + o.weight_decay * r.w[i], 2));
    r.x += largest;
    const double rate = kRate / (o.beta1 + std::sqrt(r.x));
    Vector z(kDim);
    for (std::uint32_t i = 0; i < kDim; ++i) {
      z[i] = g[i] + o.weight_decay * r.w[i] - r.w[i] / rate;
      square += z[i] * z[i];
    }
    const double length = std::sqrt(square);
    for (std::uint32_t i = 0; i < kDim; ++i) r.w[i] = length < o.l2 ? 0 : -rate * (1 - o.l2 / length) * z[i];
  });
}

TEST("moving average: the gradient is the new value") {
  Optimizer o = make(OptimizerKind::kMovingAverage);
  o.momentum = 0.8f;
  follows(o, {}, [](Reference& r, const Optimizer& o, const Vector& g, int) {
    for (std::uint32_t i = 0; i < kDim; ++i) r.w[i] = o.momentum * r.w[i] + (1 - o.momentum) * g[i];
  });
}
