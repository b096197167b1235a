#include "kernels/softmax_statistics.h"

#include "kernels/levels.h"

namespace tessera::kernels {

TESSERA_KERNEL_LEVELS(SoftmaxStatisticsKernel, kSoftmaxStatistics);

SoftmaxStatisticsKernel softmax_statistics_kernel(Isa isa) noexcept {
  const auto* kernel = kSoftmaxStatisticsLevels.at(isa);
  return kernel == nullptr ? nullptr : *kernel;
}

void softmax_statistics(const SoftmaxStatisticsTask& task, std::int64_t first,
                        std::int64_t last) noexcept {
  static const SoftmaxStatisticsKernel kernel = softmax_statistics_kernel(active_isa());
  kernel(task, first, last);
}

}  // namespace tessera::kernels
