// The narrow formats of rows: bfloat16 by its definition, and the 8 bits of a quantised serving table, whose ends must
// saturate: a weight that wrapped around would change its sign.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "check.h"

#define MONOLITH_ISA small_formats_under_test
#include "kernels/number_formats.h"

namespace {

using namespace monolith::small_formats_under_test;

std::uint32_t raw(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float from_raw(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace

TEST("a bfloat is the upper half of a float") {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto bfloat = static_cast<std::uint16_t>(bits);
    const float value = bfloat_to_float(bfloat);
    REQUIRE(raw(value) == bits << 16);
    if (std::isnan(value)) {
      REQUIRE(std::isnan(bfloat_to_float(float_to_bfloat(value))));
    } else {
      REQUIRE(float_to_bfloat(value) == bfloat);
    }
  }
}

TEST("a float between two bfloats goes to the nearer one, a tie to the even one") {
  for (std::uint32_t bits = 0; bits < 0x7f7f; ++bits) {
    const std::uint32_t middle = bits << 16 | 0x8000;
    const auto below = static_cast<std::uint16_t>(bits), above = static_cast<std::uint16_t>(bits + 1);
    REQUIRE(float_to_bfloat(from_raw(middle)) == (below & 1 ? above : below));
    REQUIRE(float_to_bfloat(from_raw(middle - 1)) == below);
    REQUIRE(float_to_bfloat(from_raw(middle + 1)) == above);
    REQUIRE(float_to_bfloat(from_raw((middle + 1) | 0x80000000u)) == (above | 0x8000));
  }
}

TEST("bfloats have infinities and keep NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_EQ(float_to_bfloat(infinity), 0x7f80);
  CHECK_EQ(float_to_bfloat(-infinity), 0xff80);
  CHECK_EQ(float_to_bfloat(std::numeric_limits<float>::max()), 0x7f80);
  // A NaN whose bits are all in the half that is cut off must not become infinite.
  CHECK(std::isnan(bfloat_to_float(float_to_bfloat(from_raw(0x7f800001)))));
  CHECK(std::isnan(bfloat_to_float(float_to_bfloat_stochastic(from_raw(0x7f800001), 5))));
  CHECK_EQ(float_to_bfloat_stochastic(infinity, 0xffffff), 0x7f80);
}

TEST("stochastic rounding to bfloats keeps exact values and is right on average") {
  std::mt19937 random(5);
  constexpr int kDraws = 20000;
  for (const float x : {1.0f, -2.5f, 0x1p-100f}) {
    CHECK_EQ(float_to_bfloat_stochastic(x, 0), float_to_bfloat(x));
    CHECK_EQ(float_to_bfloat_stochastic(x, 0xffffff), float_to_bfloat(x));
  }
  for (const float x : {1.001f, -3.14159f, 77.7f}) {
    double sum = 0;
    for (int i = 0; i < kDraws; ++i) sum += bfloat_to_float(float_to_bfloat_stochastic(x, static_cast<std::uint32_t>(random() >> 8)));
    CHECK_NEAR(sum / kDraws, x, 4 * std::abs(x) / 128 / std::sqrt(kDraws));
  }
}

TEST("fixed point rounds half away from zero") {
  const float quantum = 1.0f / 128;
  for (int q = -128; q <= 127; ++q) {
    const float exact = static_cast<float>(q) * quantum;
    REQUIRE(float_to_fixed8(exact, quantum) == q);
    REQUIRE(fixed8_to_float(static_cast<std::int8_t>(q), quantum) == exact);
    if (q >= 0 && q < 127) REQUIRE(float_to_fixed8(exact + quantum / 2, quantum) == q + 1);
    if (q <= 0 && q > -128) REQUIRE(float_to_fixed8(exact - quantum / 2, quantum) == q - 1);
    if (q > -128 && q < 127) {
      REQUIRE(float_to_fixed8(exact + quantum * 0.49f, quantum) == q);
      REQUIRE(float_to_fixed8(exact - quantum * 0.49f, quantum) == q);
    }
  }
}

TEST("fixed point saturates and has no NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float quantum : {1.0f / 128, 0.5f, 3.0f}) {
    CHECK_EQ(static_cast<int>(float_to_fixed8(1e6f * quantum, quantum)), 127);
    CHECK_EQ(static_cast<int>(float_to_fixed8(-1e6f * quantum, quantum)), -128);
    CHECK_EQ(static_cast<int>(float_to_fixed8(127.4f * quantum, quantum)), 127);
    CHECK_EQ(static_cast<int>(float_to_fixed8(-128.4f * quantum, quantum)), -128);
    CHECK_EQ(static_cast<int>(float_to_fixed8(infinity, quantum)), 127);
    CHECK_EQ(static_cast<int>(float_to_fixed8(-infinity, quantum)), -128);
    CHECK_EQ(static_cast<int>(float_to_fixed8(std::nanf(""), quantum)), 0);
    CHECK_EQ(static_cast<int>(float_to_fixed8(0.0f, quantum)), 0);
    CHECK_EQ(static_cast<int>(float_to_fixed8(-0.0f, quantum)), 0);
  }
}
