// dlrm/model.h — the dense part of a recommender: DLRM, or DCN-v2 in place of its interaction.
//
// The tables are not here: forward takes their pooled rows as a KeyedTensor, from one rank's
// EmbeddingBagCollection or from a sharded one.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "tessera/comm/awaitable.h"
#include "tessera/embedding/dot_interaction.h"
#include "tessera/jagged/keyed_tensor.h"

namespace tessera::workloads::dlrm {

enum class Interaction : std::uint8_t {
  kDot,    // products of all pairs of [dense; embeddings]
  kCross,  // DCN-v2: low-rank cross layers over [dense; embeddings] side by side
};

struct DlrmOptions {
  std::int64_t num_dense = 13;
  /// The features whose embeddings are used, in this order.
  std::vector<std::string> features;
  /// Width of the embeddings, and of the last layer of `bottom`.
  std::int64_t embedding_dim = 32;
  /// Columns of the features' tables, if some have others: those rows pass a linear layer without
  /// bias that makes them `embedding_dim` wide. Empty: all alike.
  std::vector<std::int64_t> dims = {};
  std::vector<std::int64_t> bottom = {128, 32};
  std::vector<std::int64_t> top = {128, 64, 1};
  Interaction interaction = Interaction::kDot;
  std::int64_t cross_layers = 3;
  std::int64_t cross_rank = 64;
  /// All ranks draw the same parameters from one seed.
  std::uint64_t seed = 1;
};

/// Linear layers with ReLU after each, after the last only if `relu_at_end`.
class Perceptron : public torch::nn::Module {
 public:
  Perceptron(std::int64_t num_inputs, const std::vector<std::int64_t>& widths, bool relu_at_end);
  torch::Tensor forward(torch::Tensor x);
  /// The same, whose backward gives the gradient of x before those of the weights, which are left
  /// until what is recorded after this call has had its turn. Same bits; differentiable once. The
  /// function is for one call, as long as this lives.
  std::function<torch::Tensor(torch::Tensor)> weights_later();

 private:
  std::vector<torch::nn::Linear> layers_;
  bool relu_at_end_;
};

using embedding::dot_interaction;
using embedding::dot_interaction_reference;

/// DCN-v2 in its low-rank form: x' = x0 * (W (V x) + b) + x per layer.
class LowRankCross : public torch::nn::Module {
 public:
  LowRankCross(std::int64_t width, std::int64_t rank, std::int64_t num_layers);
  torch::Tensor forward(const torch::Tensor& x0);

 private:
  std::vector<torch::nn::Linear> down_;  // V, without bias
  std::vector<torch::nn::Linear> up_;    // W and b
};

/// dense → bottom layers; interaction with the embeddings; top layers → logits.
class Dlrm : public torch::nn::Module {
 public:
  /// Throws ValueError for widths that do not fit together.
  explicit Dlrm(const DlrmOptions& options);

  /// Logits [batch] for dense [batch, num_dense] and the pooled embeddings of a batch, which may
  /// still be on their way: the bottom layers do not wait for them, in backward neither. Not
  /// collective. Throws ValueError or IndexError for shapes or keys that do not fit.
  torch::Tensor forward(const torch::Tensor& dense,
                        const comm::LazyAwaitable<jagged::KeyedTensor>& embeddings);
  torch::Tensor forward(const torch::Tensor& dense, const jagged::KeyedTensor& embeddings);

  const DlrmOptions& options() const noexcept { return options_; }
  std::int64_t num_parameters() const;

 private:
  std::vector<std::int64_t> order_of(const std::vector<std::string>& keys) const;
  std::int64_t dim_of(std::size_t feature) const;
  torch::Tensor in_one_width(const jagged::KeyedTensor& embeddings) const;

  DlrmOptions options_;
  std::shared_ptr<Perceptron> bottom_;
  std::shared_ptr<LowRankCross> cross_;
  std::shared_ptr<Perceptron> top_;
  /// "projection_<number of the feature>"; nothing for features as wide as the model.
  std::vector<std::shared_ptr<torch::nn::LinearImpl>> projections_;
};

}  // namespace tessera::workloads::dlrm
