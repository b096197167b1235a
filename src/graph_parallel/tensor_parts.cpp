#include "tessera/graph_parallel/tensor_parts.h"

#include <algorithm>

#include <ATen/Functions.h>

#include "tessera/core/check.h"
#include "tessera/graph_parallel/gp_group.h"
#include "tessera/regions/gather_scatter.h"

namespace tessera::graph_parallel {
namespace {

std::int64_t checked_dim(const char* operation, const at::Tensor& tensor, std::int64_t dim) {
  TESSERA_CHECK_VALUE(dim >= -tensor.dim() && dim < tensor.dim(), "graph.", operation,
                      ": there is no dimension ", dim, " in a tensor of ", tensor.dim(), ".");
  return dim < 0 ? dim + tensor.dim() : dim;
}

}  // namespace

at::Tensor pad_tensor(const at::Tensor& tensor, std::int64_t dim,
                      std::optional<std::int64_t> target_size) {
  return pad_tensor(tensor, dim, target_size, get_gp_world_size());
}

at::Tensor pad_tensor(const at::Tensor& tensor, std::int64_t dim,
                      std::optional<std::int64_t> target_size, int num_parts) {
  dim = checked_dim("pad_tensor", tensor, dim);
  const std::int64_t extent = tensor.size(dim);
  const std::int64_t target =
      target_size.value_or((extent + num_parts - 1) / num_parts * num_parts);
  TESSERA_CHECK_VALUE(target >= extent, "graph.pad_tensor: dimension ", dim, " has ", extent,
                      " entries, more than the target of ", target, ".");
  if (target == extent) return tensor;
  auto shape = tensor.sizes().vec();
  shape[dim] = target - extent;
  return at::cat({tensor, at::zeros(shape, tensor.options().requires_grad(false))}, dim);
}

std::pair<at::Tensor, at::Tensor> trim_tensor(const at::Tensor& tensor, const at::Tensor& sizes,
                                              std::int64_t dim) {
  return trim_tensor(tensor, sizes, dim, get_gp_world_size());
}

std::pair<at::Tensor, at::Tensor> trim_tensor(const at::Tensor& tensor, const at::Tensor& sizes,
                                              std::int64_t dim, int num_parts) {
  dim = checked_dim("trim_tensor", tensor, dim);
  const std::int64_t extent = tensor.size(dim);
  std::int64_t surplus = extent % num_parts;
  const at::Tensor trimmed = tensor.narrow(dim, 0, extent - surplus);
  if (!sizes.defined()) return {trimmed, sizes};
  at::Tensor left = sizes.cpu().to(at::kLong).clone();
  auto* size = left.data_ptr<std::int64_t>();
  for (std::int64_t part = left.numel() - 1; part >= 0 && surplus > 0; --part) {
    const std::int64_t taken = std::min(size[part], surplus);
    size[part] -= taken;
    surplus -= taken;
  }
  return {trimmed, left.to(sizes.options())};
}

std::vector<at::Tensor> _split_tensor(const at::Tensor& tensor, int num_parts, std::int64_t dim,
                                      bool contiguous_chunks) {
  dim = checked_dim("_split_tensor", tensor, dim);
  const auto sizes = regions::even_sizes(tensor.size(dim), num_parts);
  std::vector<at::Tensor> chunks = tensor.split_with_sizes(sizes, dim);
  if (contiguous_chunks) {
    for (at::Tensor& chunk : chunks) chunk = chunk.contiguous();
  }
  return chunks;
}

}  // namespace tessera::graph_parallel
