// tessera/graph_parallel/model_parallel_regions.h — the regions over the graph-parallel group,
// under the names of ocpmodels.common.gp_utils.
//
// Everything here is collective over get_gp_group(); before setup_gp, and in a group of one, it is
// the identity. New code takes tessera/regions/regions.h, where the group is an argument and a
// gather whose gradients are summed is at hand.

#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace torch::autograd {
struct AutogradContext;
}

namespace tessera::graph_parallel {

/// The sum over the group, as a new tensor; `context` is not used. Not differentiable.
TESSERA_API at::Tensor _reduce(torch::autograd::AutogradContext* context, const at::Tensor& input);
/// This rank's piece of _split_tensor, contiguous.
TESSERA_API at::Tensor _split(const at::Tensor& input, std::int64_t dim = -1);
/// The ranks' tensors, joined along `dim`. They have the same shape. Not differentiable.
TESSERA_API at::Tensor _gather(const at::Tensor& input, std::int64_t dim = -1);
/// The same for tensors that differ along `dim`; nothing is padded. Not differentiable.
TESSERA_API at::Tensor _gather_with_padding(const at::Tensor& input, std::int64_t dim = -1);

/// regions::copy.
TESSERA_API at::Tensor copy_to_model_parallel_region(const at::Tensor& input);
/// regions::reduce.
TESSERA_API at::Tensor reduce_from_model_parallel_region(const at::Tensor& input);
/// regions::scatter in even parts.
TESSERA_API at::Tensor scatter_to_model_parallel_region(const at::Tensor& input,
                                                        std::int64_t dim = -1);
/// regions::gather: right only if all ranks do the same with the result.
TESSERA_API at::Tensor gather_from_model_parallel_region(const at::Tensor& input,
                                                         std::int64_t dim = -1);

/// The same as types, the way the reference spells them.
struct CopyToModelParallelRegion {
  static at::Tensor apply(const at::Tensor& input) { return copy_to_model_parallel_region(input); }
};
struct ReduceFromModelParallelRegion {
  static at::Tensor apply(const at::Tensor& input) {
    return reduce_from_model_parallel_region(input);
  }
};
struct ScatterToModelParallelRegion {
  static at::Tensor apply(const at::Tensor& input, std::int64_t dim = -1) {
    return scatter_to_model_parallel_region(input, dim);
  }
};
struct GatherFromModelParallelRegion {
  static at::Tensor apply(const at::Tensor& input, std::int64_t dim = -1) {
    return gather_from_model_parallel_region(input, dim);
  }
};

}  // namespace tessera::graph_parallel
