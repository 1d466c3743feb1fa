// Rows in half precision are converted on every lookup and every step. A conversion that is wrong by one bit, for one of the
// 65,536 halves or at one boundary between them, trains another model on every machine that has it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"

#define MONOLITH_ISA formats_under_test
#include "kernels/number_formats.h"

namespace {

using namespace monolith::formats_under_test;

// What a half means, by its definition: sign, five bits of exponent, ten of fraction.
double meaning(std::uint16_t half) {
  const double sign = half & 0x8000 ? -1 : 1;
  const int exponent = half >> 10 & 31;
  const double fraction = half & 1023;
  if (exponent == 31) return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

bool same_float(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

}  // namespace

TEST("every half is the float it means") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = half_to_float(half);
    if (std::isnan(meaning(half))) {
      REQUIRE(std::isnan(value));
    } else {
      REQUIRE(same_float(value, static_cast<float>(meaning(half))));
    }
  }
}

TEST("every half that is a number comes back as itself") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    if (std::isnan(meaning(half))) {
      const std::uint16_t back = float_to_half(half_to_float(half));
      REQUIRE(std::isnan(meaning(back)));
      REQUIRE((back & 0x8000) == (half & 0x8000));
    } else {
      REQUIRE(float_to_half(half_to_float(half)) == half);
    }
  }
}

TEST("a float between two halves goes to the nearer one, a tie to the even one") {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const auto below = static_cast<std::uint16_t>(bits);
    const auto above = static_cast<std::uint16_t>(bits + 1);
    const float middle = static_cast<float>((meaning(below) + meaning(above)) / 2);  // exact: one bit more than a half has
    const std::uint16_t even = below & 1 ? above : below;
    for (const std::uint16_t sign : {std::uint16_t{0}, std::uint16_t{0x8000}}) {
      const float signed_middle = sign != 0 ? -middle : middle;
      REQUIRE(float_to_half(signed_middle) == (even | sign));
      REQUIRE(float_to_half(std::nextafter(signed_middle, 0.0f)) == (below | sign));
      REQUIRE(float_to_half(std::nextafter(signed_middle, sign != 0 ? -1e9f : 1e9f)) == (above | sign));
    }
  }
}

TEST("what is larger than every half becomes infinite, what is smaller becomes zero") {
  CHECK_EQ(float_to_half(65504.0f), 0x7bff);
  CHECK_EQ(float_to_half(65519.99f), 0x7bff);
  CHECK_EQ(float_to_half(65520.0f), 0x7c00);
  CHECK_EQ(float_to_half(1e30f), 0x7c00);
  CHECK_EQ(float_to_half(-1e30f), 0xfc00);
  CHECK_EQ(float_to_half(std::numeric_limits<float>::infinity()), 0x7c00);
  CHECK_EQ(float_to_half(0x1p-25f), 0x0000);  // half of the smallest: a tie, to the even one
  CHECK_EQ(float_to_half(std::nextafter(0x1p-25f, 1.0f)), 0x0001);
  CHECK_EQ(float_to_half(1e-30f), 0x0000);
  CHECK_EQ(float_to_half(-1e-30f), 0x8000);
  CHECK_EQ(float_to_half(-0.0f), 0x8000);
  CHECK_EQ(float_to_half(std::numeric_limits<float>::denorm_min()), 0x0000);
}

TEST("stochastic rounding keeps exact values and stays between the two neighbours") {
  std::mt19937 random(3);
  for (std::uint32_t bits = 0; bits < 0x7c00; bits += 7) {
    const auto half = static_cast<std::uint16_t>(bits);
    REQUIRE(float_to_half_stochastic(half_to_float(half), 0) == half);
    REQUIRE(float_to_half_stochastic(half_to_float(half), 0xffffff) == half);
    const float between = static_cast<float>(meaning(half) + (meaning(static_cast<std::uint16_t>(half + 1)) - meaning(half)) * 0.3);
    if (!std::isfinite(between) || bits == 0x7bff) continue;
    const std::uint16_t low = float_to_half_stochastic(between, 0xffffff);
    const std::uint16_t high = float_to_half_stochastic(between, 0);
    REQUIRE(low == half);
    REQUIRE(high == half + 1);
  }
}

TEST("stochastic rounding is right on average") {
  std::mt19937 random(4);
  constexpr int kDraws = 20000;
  for (const float x : {0.1f, -1.3f, 3.14159f, 1000.3f, 0x1p-20f + 0x1p-26f}) {
    double sum = 0;
    for (int i = 0; i < kDraws; ++i) sum += meaning(float_to_half_stochastic(x, static_cast<std::uint32_t>(random() >> 8)));
    const double step = std::abs(meaning(static_cast<std::uint16_t>(float_to_half(x) + 1)) - meaning(float_to_half(x)));
    CHECK_NEAR(sum / kDraws, x, 4 * step / std::sqrt(kDraws));
  }
}
