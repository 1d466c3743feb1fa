// Conversions between float and the stored formats. Included only by kernels.cc, once per instruction set; all sets agree
// bit for bit.
#pragma once

#include <cstdint>

namespace monolith {
namespace MONOLITH_ISA {
namespace {

inline std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t magnitude = h & 0x7FFFu;
  // Subnormals and zero: exact as a product; others: rebias the exponent, infinities and NaN once more.
  const float small = static_cast<float>(magnitude) * 0x1p-24f;
  std::uint32_t normal = (magnitude << 13) + (112u << 23);
  if (magnitude >= 0x7C00u) normal += 112u << 23;
  return float_of(sign | (magnitude < 0x0400u ? bits_of(small) : normal));
}

// The half at or next below |x| (towards zero), and how far x lies between it and the next one up, in 2^-24 steps.
struct HalfInterval {
  std::uint16_t below;
  std::uint32_t fraction;  // [0, 2^24)
};

inline HalfInterval half_interval(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<std::uint16_t>(sign | 0x7E00u), 0};  // NaN
  if (magnitude >= 0x47800000u) {  // 65536 and more, infinity included
    return {static_cast<std::uint16_t>(sign | 0x7C00u), 0};
  }
  if (magnitude >= 0x38800000u) {  // normal half
    return {static_cast<std::uint16_t>(sign | ((magnitude - (112u << 23)) >> 13)), (magnitude & 0x1FFFu) << 11};
  }
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 90) {  // below 2^-37: too small to be told from zero in 24 bits of fraction
    return {sign, 0};
  }
  // Subnormal half: units of 2^-24.
  const std::uint64_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  const std::uint64_t scaled = (mantissa << 24) >> (126 - exponent);  // value / 2^-24 with 24 fraction bits
  return {static_cast<std::uint16_t>(sign | static_cast<std::uint16_t>(scaled >> 24)),
          static_cast<std::uint32_t>(scaled & 0xFFFFFFu)};
}

inline std::uint16_t float_to_half(float x) {
  const HalfInterval interval = half_interval(x);
  const bool up = interval.fraction > 0x800000u || (interval.fraction == 0x800000u && (interval.below & 1));
  return static_cast<std::uint16_t>(interval.below + up);
}

// random: 24 uniform bits. Rounds up with probability equal to the fraction; exact values stay.
inline std::uint16_t float_to_half_stochastic(float x, std::uint32_t random) {
  const HalfInterval interval = half_interval(x);
  return static_cast<std::uint16_t>(interval.below + (random < interval.fraction));
}

inline float bfloat_to_float(std::uint16_t b) { return float_of(static_cast<std::uint32_t>(b) << 16); }

inline std::uint16_t float_to_bfloat(float x) {
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

inline std::uint16_t float_to_bfloat_stochastic(float x, std::uint32_t random) {
  const std::uint32_t bits = bits_of(x);
  if ((bits & 0x7F800000u) == 0x7F800000u) return float_to_bfloat(x);
  return static_cast<std::uint16_t>((bits + (random >> 8)) >> 16);
}

// 8-bit fixed point: round half away from zero, clamp; NaN becomes 0.
inline std::int8_t float_to_fixed8(float x, float quantum) {
  if (x != x) return 0;
  const float shifted = (x + (x >= 0 ? quantum / 2 : -quantum / 2)) / quantum;
  if (shifted >= 127) return 127;
  if (shifted <= -128) return -128;
  return static_cast<std::int8_t>(shifted);
}

inline float fixed8_to_float(std::int8_t q, float quantum) { return static_cast<float>(q) * quantum; }

}  // namespace
}  // namespace MONOLITH_ISA
}  // namespace monolith
