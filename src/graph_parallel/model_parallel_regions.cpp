#include "tessera/graph_parallel/model_parallel_regions.h"

#include <ATen/core/grad_mode.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/graph_parallel/gp_group.h"
#include "tessera/graph_parallel/tensor_parts.h"
#include "tessera/regions/regions.h"

namespace tessera::graph_parallel {
namespace {

bool is_alone() { return get_gp_world_size() == 1; }

}  // namespace

at::Tensor _reduce(torch::autograd::AutogradContext*, const at::Tensor& input) {
  return is_alone() ? input : comm::all_reduce(input, *get_gp_group());
}

at::Tensor _split(const at::Tensor& input, std::int64_t dim) {
  if (is_alone()) return input;
  return _split_tensor(input, get_gp_world_size(), dim)[get_gp_rank()].contiguous();
}

at::Tensor _gather(const at::Tensor& input, std::int64_t dim) {
  if (is_alone()) return input;
  const at::NoGradGuard guard;
  const bool has_dim = dim >= -input.dim() && dim < input.dim();
  // Equal shapes are part of the call, so a different one is an error on all ranks.
  return regions::gather(
      input, *get_gp_group(), dim,
      has_dim ? std::optional(regions::Sizes(get_gp_world_size(), input.size(dim))) : std::nullopt);
}

at::Tensor _gather_with_padding(const at::Tensor& input, std::int64_t dim) {
  if (is_alone()) return input;
  const at::NoGradGuard guard;
  return regions::gather(input, *get_gp_group(), dim);
}

at::Tensor copy_to_model_parallel_region(const at::Tensor& input) {
  return is_alone() ? input : regions::copy(input, *get_gp_group());
}

at::Tensor reduce_from_model_parallel_region(const at::Tensor& input) {
  return is_alone() ? input : regions::reduce(input, *get_gp_group());
}

at::Tensor scatter_to_model_parallel_region(const at::Tensor& input, std::int64_t dim) {
  return is_alone() ? input : regions::scatter(input, *get_gp_group(), dim);
}

at::Tensor gather_from_model_parallel_region(const at::Tensor& input, std::int64_t dim) {
  return is_alone() ? input : regions::gather(input, *get_gp_group(), dim);
}

}  // namespace tessera::graph_parallel
