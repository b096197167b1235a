// On float32, with a backward of its own: torch's operators put all vectors side by side, multiply
// whole squares, pick the triangle by an index and add it back by another.

#include "tessera/embedding/dot_interaction.h"

#include <numeric>
#include <set>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include "kernels/pair_products.h"
#include "tessera/core/check.h"

namespace tessera::embedding {
namespace {

// Samples below which another thread is not worth waking: about 20 microseconds of work.
constexpr std::int64_t kGrain = 32;

// The number of parts that the embeddings have.
std::int64_t parts_of(const at::Tensor& dense, const at::Tensor& embeddings) {
  TESSERA_CHECK_VALUE(dense.dim() == 2 && embeddings.dim() == 2 &&
                          dense.size(0) == embeddings.size(0) && dense.size(1) > 0 &&
                          embeddings.size(1) % dense.size(1) == 0,
                      "dot_interaction: dense has shape ", dense.sizes(), " and the embeddings ",
                      embeddings.sizes(), "; they must be [batch, dim] and [batch, n * dim].");
  return embeddings.size(1) / dense.size(1);
}

std::vector<std::int64_t> checked_order(std::vector<std::int64_t> order, std::int64_t parts) {
  if (order.empty()) {
    order.resize(static_cast<std::size_t>(parts));
    std::iota(order.begin(), order.end(), 0);
  }
  std::set<std::int64_t> taken;
  for (const std::int64_t part : order) {
    const bool is_new = part >= 0 && part < parts && taken.insert(part).second;
    TESSERA_CHECK_VALUE(is_new, "dot_interaction: the order names part ", part, " of ", parts,
                        ", which is not there or was named before.");
  }
  return order;
}

// `offsets`: where each part that takes part begins in a row of embeddings.
kernels::SampleVectors vectors_of(const at::Tensor& dense, const at::Tensor& embeddings,
                                  const std::vector<std::int64_t>& offsets) {
  return {dense.const_data_ptr<float>(),
          dense.size(1),
          embeddings.const_data_ptr<float>(),
          embeddings.size(1),
          offsets.data(),
          static_cast<std::int64_t>(offsets.size()),
          dense.size(1)};
}

class DotInteraction : public torch::autograd::Function<DotInteraction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& dense,
                            const at::Tensor& embeddings,
                            const std::vector<std::int64_t>& offsets) {
    const auto first = dense.to(at::kFloat).contiguous();
    const auto rows = embeddings.to(at::kFloat).contiguous();
    const kernels::SampleVectors vectors = vectors_of(first, rows, offsets);
    auto out = at::empty({dense.size(0), vectors.num_outputs()}, first.options());
    auto* outputs = out.data_ptr<float>();
    at::parallel_for(0, dense.size(0), kGrain, [&](std::int64_t begin, std::int64_t end) {
      kernels::pair_product_kernels().products(vectors, begin, end, outputs);
    });
    context->save_for_backward({first, rows});
    context->saved_data["offsets"] = offsets;
    context->saved_data["dense_type"] = dense.scalar_type();
    context->saved_data["embeddings_type"] = embeddings.scalar_type();
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& dense = saved[0];
    const at::Tensor& embeddings = saved[1];
    const auto offsets = context->saved_data["offsets"].toIntVector();
    const kernels::SampleVectors vectors = vectors_of(dense, embeddings, offsets);
    const auto grad = grads[0].contiguous();
    auto grad_dense = at::empty_like(dense);
    const bool all_take_part = vectors.count * vectors.dim == embeddings.size(1);
    auto grad_rows = all_take_part ? at::empty_like(embeddings) : at::zeros_like(embeddings);
    const auto* gradients = grad.const_data_ptr<float>();
    auto* of_dense = grad_dense.data_ptr<float>();
    auto* of_rows = grad_rows.data_ptr<float>();
    at::parallel_for(0, dense.size(0), kGrain, [&](std::int64_t begin, std::int64_t end) {
      kernels::pair_product_kernels().gradients(vectors, begin, end, gradients, of_dense, of_rows);
    });
    return {grad_dense.to(context->saved_data["dense_type"].toScalarType()),
            grad_rows.to(context->saved_data["embeddings_type"].toScalarType()), at::Tensor()};
  }
};

}  // namespace

at::Tensor dot_interaction(const at::Tensor& dense, const at::Tensor& embeddings,
                           const std::vector<std::int64_t>& order) {
  const std::int64_t num_parts = parts_of(dense, embeddings);
  const std::vector<std::int64_t> parts = checked_order(order, num_parts);
  const std::int64_t dim = dense.size(1);
  const auto is_wide = [](const at::Tensor& tensor) { return tensor.scalar_type() == at::kDouble; };
  const bool is_few = static_cast<std::int64_t>(parts.size()) <= kernels::kMostPairVectors;
  if (dense.is_cpu() && is_few && !is_wide(dense) && !is_wide(embeddings)) {
    std::vector<std::int64_t> offsets;
    for (const std::int64_t part : parts) offsets.push_back(part * dim);
    return DotInteraction::apply(dense, embeddings, offsets);
  }
  std::vector<std::int64_t> as_they_lie(static_cast<std::size_t>(num_parts));
  std::iota(as_they_lie.begin(), as_they_lie.end(), 0);
  if (parts == as_they_lie) return dot_interaction_reference(dense, embeddings);
  at::Tensor chosen = at::tensor(parts, at::kLong);
  // Not waited for.
  if (dense.is_cuda()) chosen = chosen.pin_memory().to(dense.device(), /*non_blocking=*/true);
  return dot_interaction_reference(
      dense, embeddings.view({dense.size(0), num_parts, dim}).index_select(1, chosen).flatten(1));
}

at::Tensor dot_interaction_reference(const at::Tensor& dense, const at::Tensor& embeddings) {
  const std::int64_t count = parts_of(dense, embeddings) + 1;
  const auto vectors = at::cat({dense, embeddings}, 1).view({dense.size(0), count, dense.size(1)});
  const auto products = at::bmm(vectors, vectors.transpose(1, 2));
  const auto pair = at::tril_indices(count, count, -1, dense.options().dtype(at::kLong));
  const auto place = pair[0] * count + pair[1];
  return at::cat({dense, products.flatten(1).index_select(1, place)}, 1);
}

}  // namespace tessera::embedding
