#include "kernels/kernels.h"

#include <cmath>

#include "cpu_features.h"

namespace monolith {

namespace baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace x86_64_v3 {
extern const Kernels kKernels;
}
namespace x86_64_v4 {
extern const Kernels kKernels;
}
#endif

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> sets = [] {
    std::vector<const Kernels*> found = {&baseline::kKernels};
#if defined(__x86_64__)
    if (cpu_features().avx2) found.push_back(&x86_64_v3::kKernels);
    if (cpu_features().avx512) found.push_back(&x86_64_v4::kKernels);
#endif
    return found;
  }();
  return sets;
}

const Kernels& kernels() { return *all_kernels().back(); }

double normal_quantile(double p) noexcept {
  // A rough start (Hastings' rational approximation), then Halley's iteration on erfc until it is exact to the last digits:
  // slow beside a long rational fit, but it runs once per element of a new row and needs no table of constants.
  const double tail = p < 0.5 ? p : 1 - p;
  const double t = std::sqrt(-2 * std::log(tail));
  double x = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
  x = -x;  // the quantile of `tail`
  for (int i = 0; i < 2; ++i) {
    const double error = 0.5 * std::erfc(-x / std::sqrt(2.0)) - tail;
    const double u = error * std::sqrt(2 * M_PI) * std::exp(x * x / 2);
    x -= u / (1 + x * u / 2);
  }
  return p < 0.5 ? x : -x;
}

}  // namespace monolith
