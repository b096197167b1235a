#include "kernels/reduce.h"

#include "kernels/levels.h"

namespace tessera::kernels {

TESSERA_KERNEL_LEVELS(ReduceKernels, kReduceKernels);

const ReduceKernels* reduce_kernels(Isa isa) noexcept { return kReduceKernelsLevels.at(isa); }

namespace {

const ReduceKernels& active_kernels() noexcept {
  static const ReduceKernels& kernels = *reduce_kernels(active_isa());
  return kernels;
}

bool is_floating(Element element) noexcept { return element >= Element::kFloat16; }

}  // namespace

bool can_reduce(Element element, Reduction reduction) noexcept {
  switch (reduction) {
    case Reduction::kAvg:
      return is_floating(element);
    case Reduction::kBand:
    case Reduction::kBor:
    case Reduction::kBxor:
      return !is_floating(element);
    default:
      return true;
  }
}

void reduce(Element element, Reduction reduction, std::span<const void* const> sources,
            std::span<void* const> destinations, std::int64_t count, Store store) noexcept {
  active_kernels().reduce(element, reduction, sources.data(), static_cast<int>(sources.size()),
                          destinations.data(), static_cast<int>(destinations.size()), count, store);
}

void copy(void* destination, const void* source, std::size_t bytes, Store store) noexcept {
  active_kernels().copy(destination, source, bytes, store);
}

}  // namespace tessera::kernels
