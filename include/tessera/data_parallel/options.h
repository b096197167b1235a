// tessera/data_parallel/options.h — how replicas of a model are kept equal.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace tessera::data_parallel {

/// The arguments of torch's DistributedDataParallel, by the same names, and a few of ours. The same
/// on all ranks; the constructor compares them.
struct Options {
  /// Send rank 0's buffers to all before each forward. Unset means true. `broadcast_buffers` is the
  /// old name; where both are set, `forward_sync_buffers` counts.
  std::optional<bool> forward_sync_buffers;
  std::optional<bool> broadcast_buffers;
  /// Compare the models and send rank 0's parameters and buffers to all at construction.
  bool init_sync = true;

  /// Gradients are reduced in buckets of about this many MiB; unset means 25, with a first bucket
  /// of 1 MiB. `bucket_cap_mb_list` gives one size per bucket, the last one repeats.
  std::optional<double> bucket_cap_mb;
  std::vector<double> bucket_cap_mb_list;

  /// Look, after each forward, for parameters that the outputs do not depend on.
  bool find_unused_parameters = false;
  /// With find_unused_parameters: do not reduce a bucket nobody uses. All ranks must use the same
  /// parameters.
  bool skip_all_reduce_unused_params = false;
  /// The same parameters are used, the same number of times, in every iteration.
  bool static_graph = false;
  /// Start as find_unused_parameters, watch which parameters are used for a few iterations, then
  /// stop looking if all ranks have used all of them every time, and take the graph for static if
  /// the same ones were left out every time: one of these that is used later is an error. Replaces
  /// the two flags above.
  bool automatic_graph = false;

  /// Let `.grad` be a piece of its bucket: one copy of the gradients less.
  bool gradient_as_bucket_view = false;
  /// With gradient_as_bucket_view: let backward compute large gradients in their places in the
  /// buckets instead of copying them there. On the CPU, without find_unused_parameters and
  /// batched_grad_copy. Need not be the same on all ranks.
  bool direct_gradients = true;
  /// Copy the gradients of a bucket into it together.
  bool batched_grad_copy = false;

  /// Parameters and buffers that are left alone, by name.
  std::vector<std::string> ignored;
  /// Parameters that are reduced together, in one go per dtype, when the gradient of
  /// `param_to_hook_all_reduce` has been computed; for parameters used outside the forward. Both
  /// are given or neither.
  std::vector<std::string> delay_all_reduce_named_params;
  std::optional<std::string> param_to_hook_all_reduce;

  /// Only for modules on one GPU, and only as a check: tensors are not moved.
  std::vector<c10::Device> device_ids;
  std::optional<c10::Device> output_device;

  /// What the sum of the gradients is divided by; unset means the number of ranks. On a mesh, the
  /// product of the axes that see different samples; see MeshAxes.
  std::optional<double> divisor;

  /// Reduce beside backward, on a thread of the group, rather than in it. Unset means: if each rank
  /// of the group has two cores. Only shared memory asks; see docs/data_parallel.md.
  std::optional<bool> overlap;

  /// Raise, at the end of the backward that did it, when parameters got no gradient. Otherwise the
  /// next forward does.
  bool check_finalized = true;
};

}  // namespace tessera::data_parallel
