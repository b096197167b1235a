// tessera/data_parallel/gradient_clipping.h — clipping by global norm, fused with the reduction.

#pragma once

#include <memory>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

struct ClippingOptions {
  double max_norm = 1;
  /// Any positive number, or infinity for the largest element.
  double norm_type = 2;
  /// Throw if the norm is not finite. Otherwise such gradients are scaled as torch does.
  bool error_if_nonfinite = false;
};

class TESSERA_API GradientClipping : public CommHook {
 public:
  /// Norm of the whole averaged gradient of the last step, before clipping. The same on all ranks.
  virtual double total_norm() const = 0;
};

/// Reduces with `inner`, takes each bucket's norms as it arrives, and scales all gradients by
/// max_norm / (norm + 1e-6) if that is less than one: the result of clip_grad_norm_ on the averaged
/// gradient, without its walk through memory and without a message of its own.
///
/// Throws ValueError if `inner` steps the parameters itself: the norm is known only at the end.
TESSERA_API std::shared_ptr<GradientClipping> clipping_hook(std::shared_ptr<CommHook> inner,
                                                            const ClippingOptions& options);

}  // namespace tessera::data_parallel
