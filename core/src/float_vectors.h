// Vectors of floats that are read and written at any address. Vectors are explicit where the compiler, left to itself, would add one
// float at a time.
//
// A type for unaligned vectors would not need load() and store(), but compilers drop the alignment of a type that is the argument of a
// template, without a word, and the program crashes at the first address that is not a multiple of the vector's size.
#pragma once

namespace monolith {

using Vector4 = float __attribute__((vector_size(16)));
using Vector8 = float __attribute__((vector_size(32)));

// By reference, not by value: a Vector8 has no calling convention where AVX is not enabled.
template <typename Vector>
[[gnu::always_inline]] inline void load(Vector& x, const float* from) noexcept {
  __builtin_memcpy(&x, from, sizeof(x));
}
template <typename Vector>
[[gnu::always_inline]] inline void store(const Vector& x, float* to) noexcept {
  __builtin_memcpy(to, &x, sizeof(x));
}

}  // namespace monolith
