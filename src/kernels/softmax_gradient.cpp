#include "kernels/softmax_gradient.h"

#include "kernels/levels.h"

namespace tessera::kernels {

TESSERA_KERNEL_LEVELS(SoftmaxGradientKernel, kSoftmaxGradient);

SoftmaxGradientKernel softmax_gradient_kernel(Isa isa) noexcept {
  const auto* kernel = kSoftmaxGradientLevels.at(isa);
  return kernel == nullptr ? nullptr : *kernel;
}

void softmax_gradient(const SoftmaxGradientTask& task, std::int64_t first,
                      std::int64_t last) noexcept {
  static const SoftmaxGradientKernel kernel = softmax_gradient_kernel(active_isa());
  kernel(task, first, last);
}

}  // namespace tessera::kernels
