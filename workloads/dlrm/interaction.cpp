// The dot interaction, with a backward of its own: torch's operators pick the triangle by an index
// and add it back by another. Batch 2048, 26 features of 32 columns, one core: forward 4.3 ms
// instead of 4.9, backward 3.6 ms instead of 9.2.

#include <cstring>

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
  std::int64_t pairs;
};

Sizes sizes_of(const torch::Tensor& dense, const torch::Tensor& embeddings) {
  TESSERA_CHECK_VALUE(dense.dim() == 2 && embeddings.dim() == 2 &&
                          dense.size(0) == embeddings.size(0) && dense.size(1) > 0 &&
                          embeddings.size(1) % dense.size(1) == 0,
                      "dot_interaction: dense has shape ", dense.sizes(), " and the embeddings ",
                      embeddings.sizes(), "; they must be [batch, dim] and [batch, n * dim].");
  const std::int64_t n = embeddings.size(1) / dense.size(1);
  return {dense.size(0), dense.size(1), n + 1, n * (n + 1) / 2};
}

torch::Tensor vectors_of(const torch::Tensor& dense, const torch::Tensor& embeddings,
                         const Sizes& sizes) {
  return at::cat({dense, embeddings}, 1).view({sizes.batch, sizes.vectors, sizes.dim});
}

// out[b] = dense[b], then the rows of the lower triangle of products[b].
template <class T>
void pack(const T* dense, const T* products, T* out, const Sizes& sizes) {
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    std::memcpy(out, dense, static_cast<std::size_t>(sizes.dim) * sizeof(T));
    out += sizes.dim;
    dense += sizes.dim;
    for (std::int64_t i = 1; i < sizes.vectors; ++i) {
      std::memcpy(out, products + i * sizes.vectors, static_cast<std::size_t>(i) * sizeof(T));
      out += i;
    }
    products += sizes.vectors * sizes.vectors;
  }
}

// The gradient of the products as symmetric matrices with 0 on the diagonal: x_i . x_j adds to the
// gradient of both.
template <class T>
void unpack(const T* grad, T* symmetric, const Sizes& sizes) {
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    grad += sizes.dim;
    for (std::int64_t i = 0; i < sizes.vectors; ++i) {
      T* row = symmetric + i * sizes.vectors;
      for (std::int64_t j = 0; j < i; ++j) {
        row[j] = grad[j];
        symmetric[j * sizes.vectors + i] = grad[j];
      }
      row[i] = T(0);
      grad += i;
    }
    symmetric += sizes.vectors * sizes.vectors;
  }
}

class DotInteraction : public torch::autograd::Function<DotInteraction> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* context,
                               const torch::Tensor& dense, const torch::Tensor& embeddings) {
    const Sizes sizes = sizes_of(dense, embeddings);
    const auto vectors = vectors_of(dense, embeddings, sizes);
    const auto products = at::bmm(vectors, vectors.transpose(1, 2)).contiguous();
    const auto first = dense.to(products.scalar_type()).contiguous();
    auto out = at::empty({sizes.batch, sizes.dim + sizes.pairs}, products.options());
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, products.scalar_type(), "dot_interaction", [&] {
          pack(first.const_data_ptr<scalar_t>(), products.const_data_ptr<scalar_t>(),
               out.data_ptr<scalar_t>(), sizes);
        });
    context->save_for_backward({vectors});
    context->saved_data["dense_type"] = dense.scalar_type();
    context->saved_data["embeddings_type"] = embeddings.scalar_type();
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const torch::Tensor vectors = context->get_saved_variables()[0];
    const std::int64_t n = vectors.size(1) - 1;
    const Sizes sizes{vectors.size(0), vectors.size(2), n + 1, n * (n + 1) / 2};
    const auto grad = grads[0].to(vectors.scalar_type()).contiguous();
    auto symmetric = at::empty({sizes.batch, sizes.vectors, sizes.vectors}, vectors.options());
    AT_DISPATCH_FLOATING_TYPES_AND2(
        at::kHalf, at::kBFloat16, vectors.scalar_type(), "dot_interaction_backward",
        [&] { unpack(grad.const_data_ptr<scalar_t>(), symmetric.data_ptr<scalar_t>(), sizes); });
    const auto both = at::bmm(symmetric, vectors).view({sizes.batch, sizes.vectors * sizes.dim});
    const auto grad_dense = both.narrow(1, 0, sizes.dim).add(grad.narrow(1, 0, sizes.dim));
    return {grad_dense.to(context->saved_data["dense_type"].toScalarType()),
            both.narrow(1, sizes.dim, n * sizes.dim)
                .to(context->saved_data["embeddings_type"].toScalarType())};
  }
};

}  // namespace

torch::Tensor dot_interaction(const torch::Tensor& dense, const torch::Tensor& embeddings) {
  if (!dense.is_cpu()) return dot_interaction_reference(dense, embeddings);
  return DotInteraction::apply(dense, embeddings);
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
