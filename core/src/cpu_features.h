// Which instructions this machine has beyond those of every machine of its kind, the same for every compiler: what
// __builtin_cpu_supports asks is part of libgcc, and the clang that cross-compiles the wheels comes without it.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace monolith {

struct CpuFeatures {
  bool crc32c = false;  // the checksum's instruction, of SSE4.2 or of Armv8.1
  bool avx2 = false;    // with fma and bmi2, as in x86-64-v3
  bool avx512 = false;  // f, bw, cd, dq and vl, as in x86-64-v4
};

inline CpuFeatures find_cpu_features() noexcept {
  CpuFeatures found;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  const auto all = [](unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; };
  found.crc32c = all(c, bit_SSE4_2);
  const bool fma = all(c, bit_FMA | bit_AVX | bit_OSXSAVE);
  if (!fma || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  // The machine has the registers. They can be used if the kernel saves them when it switches threads: XMM and YMM are bits 1
  // and 2, the parts of AVX-512 bits 5 to 7.
  std::uint32_t saved = 0, high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  found.avx2 = all(saved, 0x06) && all(b, bit_AVX2 | bit_BMI2);
  found.avx512 =
      found.avx2 && all(saved, 0xE6) && all(b, bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL);
#elif defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kCrc32 = 1ul << 7;  // HWCAP_CRC32 of <asm/hwcap.h>, which not every toolchain has
  found.crc32c = (getauxval(AT_HWCAP) & kCrc32) != 0;
#elif defined(__ARM_FEATURE_CRC32)
  found.crc32c = true;
#endif
  return found;
}

inline const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures features = find_cpu_features();
  return features;
}

}  // namespace monolith
