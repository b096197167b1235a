// src/kernels/levels.h — the copies of one cpu/ file, one per instruction set, and the choice among
// them. For the sources that define what a kernel's header declares.

#pragma once

#include "kernels/dispatch.h"

namespace tessera::kernels {

/// The tables of one kernel; null for a level that this build does not have.
template <class Kernels>
struct KernelLevels {
  const Kernels* of_default;
  const Kernels* of_avx2;
  const Kernels* of_avx512;

  const Kernels* at(Isa isa) const noexcept {
    if (isa == Isa::kAvx512) return of_avx512;
    return isa == Isa::kAvx2 ? of_avx2 : of_default;
  }
};

}  // namespace tessera::kernels

#if defined(TESSERA_HAVE_ISA_AVX2)
#define TESSERA_DECLARE_AVX2(Kernels, name) extern const Kernels name##Avx2
#define TESSERA_AVX2_OF(name) &name##Avx2
#else
#define TESSERA_DECLARE_AVX2(Kernels, name) static_assert(true)
#define TESSERA_AVX2_OF(name) nullptr
#endif
#if defined(TESSERA_HAVE_ISA_AVX512)
#define TESSERA_DECLARE_AVX512(Kernels, name) extern const Kernels name##Avx512
#define TESSERA_AVX512_OF(name) &name##Avx512
#else
#define TESSERA_DECLARE_AVX512(Kernels, name) static_assert(true)
#define TESSERA_AVX512_OF(name) nullptr
#endif

/// Declares what the copies of a cpu/ file define as TESSERA_KERNEL_TABLE(name), and `nameLevels`
/// over them.
#define TESSERA_KERNEL_LEVELS(Kernels, name)                       \
  extern const Kernels name##Default;                              \
  TESSERA_DECLARE_AVX2(Kernels, name);                             \
  TESSERA_DECLARE_AVX512(Kernels, name);                           \
  constexpr KernelLevels<Kernels> name##Levels {                   \
    &name##Default, TESSERA_AVX2_OF(name), TESSERA_AVX512_OF(name) \
  }
