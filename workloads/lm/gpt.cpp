#include "lm/gpt.h"

#include <cmath>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/activation.h>
#include <torch/utils.h>

#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/vocab_parallel/linear.h"

namespace tessera::workloads {
namespace {

/// Sum over the group of what is the same in all its consumers: the gradient passes unchanged.
class SumOverGroup : public torch::autograd::Function<SumOverGroup> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& part,
                               const comm::Group& group) {
    return group.size() == 1 ? part.clone() : comm::all_reduce(part, group);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0], torch::Tensor()};
  }
};

}  // namespace

GptBlock::GptBlock(std::int64_t width, std::int64_t heads) : heads_(heads) {
  before_attention_ =
      register_module("before_attention", torch::nn::LayerNorm(std::vector<std::int64_t>{width}));
  in_ = register_module("in", torch::nn::Linear(width, 3 * width));
  out_ = register_module("out", torch::nn::Linear(width, width));
  before_layers_ =
      register_module("before_layers", torch::nn::LayerNorm(std::vector<std::int64_t>{width}));
  up_ = register_module("up", torch::nn::Linear(width, 4 * width));
  down_ = register_module("down", torch::nn::Linear(4 * width, width));
}

torch::Tensor GptBlock::forward(const torch::Tensor& x) {
  const std::int64_t batch = x.size(0);
  const std::int64_t length = x.size(1);
  const std::int64_t width = x.size(2);
  const auto parts = in_->forward(before_attention_->forward(x))
                         .view({batch, length, 3, heads_, width / heads_})
                         .permute({2, 0, 3, 1, 4});
  const torch::Tensor mixed = at::scaled_dot_product_attention(
      parts[0], parts[1], parts[2], std::nullopt, 0.0, /*is_causal=*/true);
  const torch::Tensor y = x + out_->forward(mixed.transpose(1, 2).reshape({batch, length, width}));
  return y + down_->forward(at::gelu(up_->forward(before_layers_->forward(y))));
}

Gpt::Gpt(const GptOptions& options, const comm::Group& vocab_group)
    : group_(vocab_group),
      vocab_size_(options.vocab_size),
      columns_(vocab_parallel::columns_of(options.vocab_size, vocab_group)) {
  TESSERA_CHECK_VALUE(options.heads > 0 && options.width % options.heads == 0, "lm: a width of ",
                      options.width, " cannot be divided into ", options.heads, " heads.");
  torch::manual_seed(options.seed);
  const auto drawn = [&](std::int64_t rows, double spread) {
    return torch::randn({rows, options.width}) * spread;
  };
  const auto own = [&](const torch::Tensor& whole) {
    return whole.slice(0, columns_.start, columns_.end).clone();
  };
  embedding_ = register_parameter("embedding", own(drawn(options.vocab_size, 0.02)));
  positions_ = register_parameter("positions", drawn(options.length, 0.02));
  head_ = register_parameter("head", own(drawn(options.vocab_size, 0.02)));
  for (std::int64_t layer = 0; layer < options.layers; ++layer) {
    blocks_.push_back(register_module("block" + std::to_string(layer),
                                      std::make_shared<GptBlock>(options.width, options.heads)));
  }
  last_norm_ =
      register_module("last_norm", torch::nn::LayerNorm(std::vector<std::int64_t>{options.width}));
}

torch::Tensor Gpt::embed(const torch::Tensor& ids) {
  if (group_.size() == 1)
    return embedding_.index_select(0, ids.reshape(-1)).view({ids.size(0), ids.size(1), -1});
  const torch::Tensor local = ids - columns_.start;
  const torch::Tensor is_own = (local >= 0).logical_and(local < columns_.size());
  torch::Tensor rows = embedding_.new_zeros({ids.size(0), ids.size(1), embedding_.size(1)});
  if (columns_.size() > 0) {
    rows = embedding_.index_select(0, local.masked_fill(is_own.logical_not(), 0).reshape(-1))
               .view({ids.size(0), ids.size(1), -1}) *
           is_own.unsqueeze(-1);
  }
  return SumOverGroup::apply(rows, group_);
}

torch::Tensor Gpt::forward(const torch::Tensor& tokens) {
  const std::int64_t length = tokens.size(1) - 1;
  vocab_parallel::LinearOptions options;
  options.columns = columns_;
  return vocab_parallel::linear_cross_entropy(hidden(tokens.narrow(1, 0, length)), head_,
                                              tokens.narrow(1, 1, length), group_, options);
}

torch::Tensor Gpt::hidden(const torch::Tensor& ids) {
  torch::Tensor x = embed(ids) + positions_.narrow(0, 0, ids.size(1));
  for (const auto& block : blocks_) x = block->forward(x);
  return last_norm_->forward(x);
}

torch::Tensor Gpt::next_logits(const torch::Tensor& tokens) {
  const torch::NoGradGuard guard;
  const torch::Tensor last = hidden(tokens.unsqueeze(0))[0][-1];
  torch::Tensor logits = last.new_zeros({vocab_size_});
  if (columns_.size() > 0) {
    logits.narrow(0, columns_.start, columns_.size()).copy_(at::mv(head_, last));
  }
  if (group_.size() > 1) comm::all_reduce_(logits, group_);
  return logits;
}

std::int64_t Gpt::num_parameters() const {
  std::int64_t count = 0;
  for (const auto& parameter : parameters()) count += parameter.numel();
  return count;
}

std::vector<checkpoint::PlacedTensor> Gpt::placed_parameters() const {
  std::vector<checkpoint::PlacedTensor> placed;
  for (const auto& item : named_parameters()) {
    const torch::Tensor& tensor = item.value();
    const bool is_cut = tensor.is_same(embedding_) || tensor.is_same(head_);
    checkpoint::PlacedTensor one;
    one.name = item.key();
    one.shape = tensor.sizes().vec();
    std::vector<std::int64_t> offsets(one.shape.size(), 0);
    if (is_cut) {
      one.shape[0] = vocab_size_;
      offsets[0] = columns_.start;
    }
    one.is_replicated = !is_cut;
    if (tensor.numel() > 0) one.pieces.push_back({std::move(offsets), tensor, {}});
    placed.push_back(std::move(one));
  }
  return placed;
}

}  // namespace tessera::workloads
