// workloads/lm/gpt.h — a small GPT whose embedding and last layer are sharded by the vocabulary.

#pragma once

#include <cstdint>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "tessera/checkpoint/state.h"
#include "tessera/comm/group.h"
#include "tessera/vocab_parallel/columns.h"

namespace tessera::workloads {

struct GptOptions {
  std::int64_t vocab_size = 256;
  std::int64_t length = 128;
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 128;
  std::uint64_t seed = 1;
};

/// One block: attention to earlier tokens, then two linear layers, each added to its input.
class GptBlock : public torch::nn::Module {
 public:
  GptBlock(std::int64_t width, std::int64_t heads);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  std::int64_t heads_;
  torch::nn::LayerNorm before_attention_{nullptr};
  torch::nn::Linear in_{nullptr};
  torch::nn::Linear out_{nullptr};
  torch::nn::LayerNorm before_layers_{nullptr};
  torch::nn::Linear up_{nullptr};
  torch::nn::Linear down_{nullptr};
};

/// The model of one rank. Parameters that are not sharded are the same on all ranks: every rank
/// draws the whole model from one seed and keeps its part.
class Gpt : public torch::nn::Module {
 public:
  Gpt(const GptOptions& options, const comm::Group& vocab_group);

  /// Mean cross entropy of the next token for tokens [batch, length + 1]. Collective over the vocab
  /// group, in backward too.
  torch::Tensor forward(const torch::Tensor& tokens);

  /// Logits [vocabulary] of the token after `tokens` [length], which are at most as long as the
  /// model's; the same on all ranks. Collective over the vocab group. No gradient.
  torch::Tensor next_logits(const torch::Tensor& tokens);

  std::int64_t num_parameters() const;

  /// All parameters by name, with the place of this rank's part in the whole: they load on any
  /// number of vocabulary ranks.
  std::vector<checkpoint::PlacedTensor> placed_parameters() const;

 private:
  torch::Tensor embed(const torch::Tensor& ids);
  torch::Tensor hidden(const torch::Tensor& ids);  // of the last layer, [batch, length, width]

  comm::Group group_;
  std::int64_t vocab_size_;
  vocab_parallel::Columns columns_;
  torch::Tensor embedding_;  // [columns, width]
  torch::Tensor positions_;  // [length, width]
  torch::Tensor head_;       // [columns, width]
  std::vector<std::shared_ptr<GptBlock>> blocks_;
  torch::nn::LayerNorm last_norm_{nullptr};
};

}  // namespace tessera::workloads
