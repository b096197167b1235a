// tessera/data_parallel/mixed_precision.h — computing, reducing and keeping buffers in types of
// one's choice, with parameters kept in full precision.
//
// On any device. Forward and backward see the parameters in `param_dtype`; gradients flow through
// the cast, so they arrive, accumulate and are stepped in the parameters' own type.

#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include "tessera/core/export.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/model_parts.h"

namespace tessera::data_parallel {

/// Types left out stay as they are.
struct MixedPrecisionOptions {
  /// What the module computes with.
  std::optional<c10::ScalarType> param_dtype;
  /// What gradients are averaged in.
  std::optional<c10::ScalarType> reduce_dtype;
  /// What floating buffers are kept in.
  std::optional<c10::ScalarType> buffer_dtype;
  /// Whether cast_input casts.
  bool cast_forward_inputs = true;
};

/// Holds a module's parameters in full precision and lends the module rounded ones.
///
/// While this object lives, the module's own parameters are values of `param_dtype` that are
/// computed from the masters before each forward; optimizers and Replica get the masters. `restore`
/// or the destructor gives the module its parameters back, with the masters' values.
class TESSERA_API MixedPrecision {
 public:
  /// Throws ValueError for a type that does not float. Not collective.
  MixedPrecision(ModelParts parts, const MixedPrecisionOptions& options);
  ~MixedPrecision();
  MixedPrecision(const MixedPrecision&) = delete;
  MixedPrecision& operator=(const MixedPrecision&) = delete;

  /// The module's parts with masters for parameters: what Replica and manifests get.
  const ModelParts& parts() const noexcept { return parts_; }
  /// The masters that have gradients, for an optimizer.
  std::vector<at::Tensor> parameters() const;
  /// Rounds the masters into the module's parameters, differentiably unless gradients are off. Call
  /// before each forward; several forwards may precede a backward.
  void before_forward();
  /// A floating tensor in `param_dtype`; others as they are.
  at::Tensor cast_input(const at::Tensor& input) const;
  /// Averages in `reduce_dtype`.
  std::shared_ptr<CommHook> hook() const;
  /// Lets the module see the masters themselves until the next forward: for saving and loading.
  void give_back();
  /// Ends the arrangement. Once.
  void restore();

 private:
  struct Pair {
    at::Tensor ours;  // full precision, a leaf
    at::Tensor lent;  // the module's own
  };
  MixedPrecisionOptions options_;
  ModelParts parts_;
  std::vector<Pair> pairs_;
};

}  // namespace tessera::data_parallel
