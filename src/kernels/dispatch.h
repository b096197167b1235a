// src/kernels/dispatch.h — which instruction set the CPU kernels use.
//
// Every kernel source in `cpu/` is compiled once per level. The level is chosen once per process:
// the best one this CPU has, or the one that TESSERA_ISA=default|avx2|avx512 asks for.

#pragma once

// Names a table of kernels after the instruction set its file is compiled for; see CMakeLists.txt.
#define TESSERA_KERNEL_JOIN_(name, level) name##level
#define TESSERA_KERNEL_JOIN(name, level) TESSERA_KERNEL_JOIN_(name, level)
#define TESSERA_KERNEL_TABLE(name) TESSERA_KERNEL_JOIN(name, TESSERA_KERNEL_LEVEL)

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::kernels {

enum class Isa : std::uint8_t { kDefault, kAvx2, kAvx512 };

/// "default", "avx2" or "avx512".
std::string_view name_of(Isa isa) noexcept;

/// Whether this CPU and this build can run kernels of the level.
bool is_supported(Isa isa) noexcept;

/// The levels that can run here, lowest first; never empty.
std::vector<Isa> supported_isas();

/// The level this process uses. If TESSERA_ISA asks for something that cannot be had, one line on
/// the standard error stream says so and the best level is used.
Isa active_isa() noexcept;

/// What active_isa chooses for a value of TESSERA_ISA (empty: not set); `warning` is left empty or
/// gets the line to print.
Isa choose_isa(std::string_view wanted, std::string& warning);

}  // namespace tessera::kernels
