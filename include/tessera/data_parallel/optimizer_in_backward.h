// tessera/data_parallel/optimizer_in_backward.h — parameters that take their step as soon as their
// bucket has been averaged, while backward still computes the others.
//
// Afterwards the parameters are what the ordinary optimizer would have made of them, and their
// gradients are undefined again: the memory of one bucket is enough. What the optimizer remembers
// is kept by parameter name.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"

namespace tessera::data_parallel {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
};

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  // 0.01 is usual for AdamW
  bool amsgrad = false;
  bool maximize = false;
};

/// Steps the parameters of one bucket. Buckets may step at the same time on different threads.
class TESSERA_API BackwardOptimizer {
 public:
  virtual ~BackwardOptimizer() = default;
  /// `averaged` holds the gradients of the bucket's parameters. Parameters outside `only` (if
  /// given) are left alone.
  virtual void step(const Bucket& bucket, const at::Tensor& averaged,
                    const std::optional<std::set<std::string>>& only) = 0;
  virtual std::string name() const = 0;
  /// For schedules. Between steps.
  virtual void set_learning_rate(double lr) = 0;
  virtual double learning_rate() const = 0;
  /// Keys are torch's, behind the parameter's name: "layer.weight/exp_avg". Shaped as the
  /// parameter.
  virtual HookState state() const = 0;
  virtual void load_state(const HookState& state) = 0;
};

/// Throw ValueError for numbers that make no sense.
TESSERA_API std::shared_ptr<BackwardOptimizer> sgd_in_backward(const SgdOptions& options);
TESSERA_API std::shared_ptr<BackwardOptimizer> adam_in_backward(const AdamOptions& options);
TESSERA_API std::shared_ptr<BackwardOptimizer> adamw_in_backward(const AdamOptions& options);

/// Reduces with `inner`, then steps the bucket's parameters, or those named in `only`. Without
/// `only`, gradients are used up: they are undefined after backward.
TESSERA_API std::shared_ptr<CommHook> hook_then_optimizer(
    std::shared_ptr<CommHook> inner, std::shared_ptr<BackwardOptimizer> optimizer,
    std::optional<std::set<std::string>> only = std::nullopt);

/// As hook_then_optimizer, but each parameter is stepped by one rank, which alone keeps what the
/// optimizer remembers of it: with n ranks, one n-th of that memory each. At the end of backward
/// the owners send the others the new values. Parameters are shared out by size, whole ones.
///
/// `state` is collective once a step was taken: every rank gets everything, and can continue with
/// another number of ranks. All ranks must load the same.
TESSERA_API std::shared_ptr<CommHook> hook_then_zero_step(
    std::shared_ptr<CommHook> inner, std::shared_ptr<BackwardOptimizer> optimizer);

}  // namespace tessera::data_parallel
