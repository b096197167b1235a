#include "kernels/dispatch.h"

#include <cstdio>
#include <cstdlib>

#include "kernels/reduce.h"

namespace tessera::kernels {

namespace {

bool cpu_has(Isa isa) noexcept {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::kDefault:
      return true;
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return cpu_has(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
  }
  return false;
#else
  return isa == Isa::kDefault;
#endif
}

Isa isa_of_this_process() noexcept {
  const char* wanted = std::getenv("TESSERA_ISA");
  std::string warning;
  const Isa isa = choose_isa(wanted == nullptr ? "" : wanted, warning);
  if (!warning.empty()) std::fprintf(stderr, "%s\n", warning.c_str());
  return isa;
}

}  // namespace

std::string_view name_of(Isa isa) noexcept {
  switch (isa) {
    case Isa::kDefault:
      return "default";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

bool is_supported(Isa isa) noexcept { return reduce_kernels(isa) != nullptr && cpu_has(isa); }

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas;
  for (const Isa isa : {Isa::kDefault, Isa::kAvx2, Isa::kAvx512}) {
    if (is_supported(isa)) isas.push_back(isa);
  }
  return isas;
}

Isa choose_isa(std::string_view wanted, std::string& warning) {
  const std::vector<Isa> isas = supported_isas();
  const Isa best = isas.back();
  if (wanted.empty()) return best;
  std::string names;
  for (const Isa isa : isas) {
    if (wanted == name_of(isa)) return isa;
    names += names.empty() ? "" : ", ";
    names += name_of(isa);
  }
  const bool is_known = wanted == name_of(Isa::kAvx2) || wanted == name_of(Isa::kAvx512);
  warning = "kernels: TESSERA_ISA=" + std::string(wanted) +
            (is_known ? " is not supported by this CPU" : " is not a level") + ". Using " +
            std::string(name_of(best)) + "; this CPU can use " + names + ".";
  return best;
}

Isa active_isa() noexcept {
  static const Isa isa = isa_of_this_process();
  return isa;
}

}  // namespace tessera::kernels
