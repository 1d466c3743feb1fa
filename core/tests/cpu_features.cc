// Danger: kernels chosen for instructions that the machine does not have, or that its kernel does not save, end in SIGILL. Kernels
// that are never chosen only make everything slow, and nobody notices.
#include "cpu_features.h"

#include <cstdint>

#include "check.h"
#include "kernels/kernels.h"

using monolith::CpuFeatures;

TEST("the features found are those that the compiler's runtime finds") {
  const CpuFeatures found = monolith::find_cpu_features();
#if defined(__x86_64__) && !defined(_LIBCPP_VERSION)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  CHECK(found.crc32c == (__builtin_cpu_supports("sse4.2") != 0));
  CHECK(found.avx2 == avx2);
  CHECK(found.avx512 == (avx2 && avx512));
#elif defined(__aarch64__) && defined(__linux__)
  // The kernel answers this read of a register that only it may read.
  std::uint64_t instructions = 0;
  asm("mrs %0, ID_AA64ISAR0_EL1" : "=r"(instructions));
  CHECK(found.crc32c == ((instructions >> 16 & 0xF) != 0));
#else
  CHECK(!found.avx512 || found.avx2);
#endif
}

TEST("there are kernels for each set of instructions that was found") {
  const CpuFeatures& found = monolith::cpu_features();
  CHECK(monolith::all_kernels().size() == 1u + found.avx2 + found.avx512);
}

TEST("a larger set of instructions contains the smaller ones") {
  const CpuFeatures found = monolith::find_cpu_features();
  // The checksum's instruction and the kernels are chosen one by one, and tests of one machine run all that it has.
  if (found.avx512) CHECK(found.avx2);
  if (found.avx2) CHECK(found.crc32c);
}

TEST("asking again gives the same answer") {
  const CpuFeatures& first = monolith::cpu_features();
  const CpuFeatures again = monolith::find_cpu_features();
  CHECK(first.crc32c == again.crc32c);
  CHECK(first.avx2 == again.avx2);
  CHECK(first.avx512 == again.avx512);
}
