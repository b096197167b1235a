// The dot interaction, with a backward of its own: torch's operators pick the triangle by an index
// and add it back by another. Batch 2048, 26 features of 32 columns, one core: forward 4.3 ms
// instead of 4.9, backward 3.6 ms instead of 9.2.

#include <cstring>
#include <numeric>
#include <set>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>

#include "dlrm/model.h"
#include "tessera/core/check.h"

namespace tessera::workloads::dlrm {
namespace {

struct Sizes {
  std::int64_t batch;
  std::int64_t dim;
  std::int64_t vectors;  // dense included
};

Sizes sizes_of(const torch::Tensor& dense, const torch::Tensor& embeddings) {
  TESSERA_CHECK_VALUE(dense.dim() == 2 && embeddings.dim() == 2 &&
                          dense.size(0) == embeddings.size(0) && dense.size(1) > 0 &&
                          embeddings.size(1) % dense.size(1) == 0,
                      "dot_interaction: dense has shape ", dense.sizes(), " and the embeddings ",
                      embeddings.sizes(), "; they must be [batch, dim] and [batch, n * dim].");
  const std::int64_t n = embeddings.size(1) / dense.size(1);
  return {dense.size(0), dense.size(1), n + 1};
}

torch::Tensor vectors_of(const torch::Tensor& dense, const torch::Tensor& embeddings,
                         const Sizes& sizes) {
  return at::cat({dense, embeddings}, 1).view({sizes.batch, sizes.vectors, sizes.dim});
}

/// Where a product and its mirror image lie in the square of all products of a sample.
struct Pair {
  std::int32_t place;
  std::int32_t mirror;
};

/// The pairs of vectors in the order of the output, of vectors that lie where `order` says: picking
/// products in another order costs nothing, moving the vectors would cost a copy of them.
std::vector<Pair> pairs_of(at::IntArrayRef order, std::int64_t vectors) {
  std::vector<std::int64_t> places = {0};
  for (const std::int64_t part : order) places.push_back(part + 1);
  std::vector<Pair> pairs;
  for (std::size_t i = 1; i < places.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      pairs.push_back({static_cast<std::int32_t>(places[i] * vectors + places[j]),
                       static_cast<std::int32_t>(places[j] * vectors + places[i])});
    }
  }
  return pairs;
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

// out[b] = dense[b], then the products of the pairs.
template <class T>
void pack(const T* dense, const T* products, T* out, const Sizes& sizes,
          const std::vector<Pair>& pairs) {
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    std::memcpy(out, dense, static_cast<std::size_t>(sizes.dim) * sizeof(T));
    out += sizes.dim;
    dense += sizes.dim;
    for (const Pair& pair : pairs) *out++ = products[pair.place];
    products += sizes.vectors * sizes.vectors;
  }
}

// The gradient of the products as symmetric matrices: x_i . x_j adds to the gradient of both.
// `symmetric` is 0 where no pair lies.
template <class T>
void unpack(const T* grad, T* symmetric, const Sizes& sizes, const std::vector<Pair>& pairs) {
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    grad += sizes.dim;
    for (const Pair& pair : pairs) {
      symmetric[pair.place] = *grad;
      symmetric[pair.mirror] = *grad++;
    }
    symmetric += sizes.vectors * sizes.vectors;
  }
}

class DotInteraction : public torch::autograd::Function<DotInteraction> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& dense, const torch::Tensor& embeddings,
                               const std::vector<std::int64_t>& order) {
    const Sizes sizes = sizes_of(dense, embeddings);
    const std::vector<Pair> pairs = pairs_of(order, sizes.vectors);
    const auto vectors = vectors_of(dense, embeddings, sizes);
    const auto products = at::bmm(vectors, vectors.transpose(1, 2)).contiguous();
    const auto first = dense.to(products.scalar_type()).contiguous();
    const auto width = sizes.dim + static_cast<std::int64_t>(pairs.size());
    auto out = at::empty({sizes.batch, width}, products.options());
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, products.scalar_type(), "dot_interaction", [&] {
          pack(first.const_data_ptr<scalar_t>(), products.const_data_ptr<scalar_t>(),
               out.data_ptr<scalar_t>(), sizes, pairs);
        });
    context->save_for_backward({vectors});
    context->saved_data["order"] = order;
    context->saved_data["dense_type"] = dense.scalar_type();
    context->saved_data["embeddings_type"] = embeddings.scalar_type();
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const torch::Tensor vectors = context->get_saved_variables()[0];
    const Sizes sizes{vectors.size(0), vectors.size(2), vectors.size(1)};
    const std::vector<Pair> pairs =
        pairs_of(context->saved_data["order"].toIntVector(), sizes.vectors);
    const auto grad = grads[0].to(vectors.scalar_type()).contiguous();
    auto symmetric = at::zeros({sizes.batch, sizes.vectors, sizes.vectors}, vectors.options());
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, vectors.scalar_type(), "dot_interaction_backward", [&] {
          unpack(grad.const_data_ptr<scalar_t>(), symmetric.data_ptr<scalar_t>(), sizes, pairs);
        });
    const auto both = at::bmm(symmetric, vectors).view({sizes.batch, sizes.vectors * sizes.dim});
    const auto grad_dense = both.narrow(1, 0, sizes.dim).add(grad.narrow(1, 0, sizes.dim));
    const auto rest = both.narrow(1, sizes.dim, (sizes.vectors - 1) * sizes.dim);
    return {grad_dense.to(context->saved_data["dense_type"].toScalarType()),
            rest.to(context->saved_data["embeddings_type"].toScalarType()), torch::Tensor()};
  }
};

}  // namespace

torch::Tensor dot_interaction(const torch::Tensor& dense, const torch::Tensor& embeddings,
                              const std::vector<std::int64_t>& order) {
  const Sizes sizes = sizes_of(dense, embeddings);
  const std::vector<std::int64_t> parts = checked_order(order, sizes.vectors - 1);
  if (dense.is_cpu()) return DotInteraction::apply(dense, embeddings, parts);
  const auto chosen = at::tensor(parts, dense.options().dtype(at::kLong));
  return dot_interaction_reference(dense,
                                   embeddings.view({sizes.batch, sizes.vectors - 1, sizes.dim})
                                       .index_select(1, chosen)
                                       .flatten(1));
}

torch::Tensor dot_interaction_reference(const torch::Tensor& dense,
                                        const torch::Tensor& embeddings) {
  const Sizes sizes = sizes_of(dense, embeddings);
  const auto vectors = vectors_of(dense, embeddings, sizes);
  const auto products = at::bmm(vectors, vectors.transpose(1, 2));
  const auto pair =
      at::tril_indices(sizes.vectors, sizes.vectors, -1, dense.options().dtype(at::kLong));
  const auto place = pair[0] * sizes.vectors + pair[1];
  return at::cat({dense, products.flatten(1).index_select(1, place)}, 1);
}

}  // namespace tessera::workloads::dlrm
