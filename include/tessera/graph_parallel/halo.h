// tessera/graph_parallel/halo.h — boundary rows to the ranks that need them, and gradients back.
//
// halo_exchange and halo_accumulate are a conjugate pair: each one's backward is a call to the
// other. Rows are slices along the first dimension, with any trailing shape, the same on all ranks.
// Floating results always require a gradient in grad mode, so that a rank without rows builds the
// same graph as the others; exchange constants under at::NoGradGuard.
//
// One exchange is one all-to-all of num_sent x row bytes out and num_halo x row bytes in. No sizes
// are exchanged: the plan knows them.

#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"
#include "tessera/graph_parallel/halo_plan.h"

namespace tessera::graph_parallel {

/// Returns the halo rows, [num_halo, ...], of `owned`, [num_owned, ...], which is not repeated.
///
/// Shard -> Shared. Collective. Differentiable any number of times.
/// Throws ValueError if `owned` does not have num_owned rows; comm::Error, the same on all ranks,
/// if the ranks' rows differ in type or shape. Other engines than ours do not compare calls
/// themselves: on the CPU they cost a few numbers for that, unless the plan was made without
/// `check`; on a GPU nothing is compared.
TESSERA_API at::Tensor halo_exchange(const at::Tensor& owned, const HaloPlan& plan);

/// Adds up `halo` rows, [num_halo, ...], at their owners: [num_owned, ...].
///
/// Partial -> Shard. Collective. Differentiable any number of times. Contributions are added in the
/// order of the ranks they come from.
TESSERA_API at::Tensor halo_accumulate(const at::Tensor& halo, const HaloPlan& plan);

/// Returns owned and halo rows in local numbering, [num_local, ...]. As halo_exchange.
TESSERA_API at::Tensor halo_extend(const at::Tensor& owned, const HaloPlan& plan);

/// Halo rows that are on their way. Movable only; `finish` may be called once.
class TESSERA_API PendingRows {
 public:
  PendingRows(PendingRows&&) noexcept;
  PendingRows& operator=(PendingRows&&) noexcept;
  ~PendingRows();

  /// Waits and returns the rows. Not collective, but every rank must come to it.
  /// Throws ValueError the second time.
  at::Tensor finish();

 private:
  struct State;
  friend TESSERA_API PendingRows halo_exchange_async(const at::Tensor& owned, const HaloPlan& plan);
  friend TESSERA_API PendingRows halo_accumulate_async(const at::Tensor& halo,
                                                       const HaloPlan& plan);
  explicit PendingRows(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// The two operators in two phases: start, do what needs no halo, finish.
///
/// Collective. In backward the phases trade places: `finish` starts the way back and the start
/// waits for it, after the gradients of what was computed in between. `owned` must not be written
/// before `finish`.
[[nodiscard]] TESSERA_API PendingRows halo_exchange_async(const at::Tensor& owned,
                                                          const HaloPlan& plan);
[[nodiscard]] TESSERA_API PendingRows halo_accumulate_async(const at::Tensor& halo,
                                                            const HaloPlan& plan);

}  // namespace tessera::graph_parallel
