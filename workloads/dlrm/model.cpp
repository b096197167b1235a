#include "dlrm/model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/core/check.h"

namespace tessera::workloads::dlrm {
namespace {

torch::nn::Linear linear(std::int64_t inputs, std::int64_t outputs, bool has_bias = true) {
  return torch::nn::Linear(torch::nn::LinearOptions(inputs, outputs).bias(has_bias));
}

// Weights of variance 2 / (inputs + outputs), biases of variance 1 / outputs, in the order of the
// parameters: the start that DLRM was published with.
void draw_parameters(torch::nn::Module& module, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(seed);
  for (auto& parameter : module.parameters()) {
    const auto outputs = static_cast<double>(parameter.size(0));
    const double variance =
        parameter.dim() == 2 ? 2 / (outputs + static_cast<double>(parameter.size(1))) : 1 / outputs;
    parameter.normal_(0, std::sqrt(variance), generator);
  }
}

// Note [Gradients of weights can wait]
// Other ranks wait for the gradients of the rows, nobody for those of the top layers' weights
// before the step. A layer is therefore two nodes: the one that was recorded with its input gives
// the gradient of the input at once and keeps what the weights' gradients are made of. The other
// was recorded before the bottom layers, so autograd, which takes what was recorded last first,
// comes to it when the rows' gradients are on their way. Both compute as LibTorch's own node, to
// the last bit.
struct Layer : torch::CustomClassHolder {
  torch::Tensor weight;
  torch::Tensor bias;
  torch::Tensor input;     // once backward has been here
  torch::Tensor gradient;  // of the output
};
using LayerPtr = c10::intrusive_ptr<Layer>;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

LayerPtr saved_layer(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<Layer>(context->saved_data["layer"].toCapsule());
}

void check_first_order() {
  TESSERA_CHECK_VALUE(!at::GradMode::is_enabled(),
                      "dlrm: the gradients of the top layers are not differentiable; call backward "
                      "without create_graph.");
}

struct Weights : Function<Weights> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& weight,
                               const torch::Tensor& bias, const LayerPtr& layer) {
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    layer->weight = weight.detach();
    layer->bias = bias.detach();
    return at::zeros({1}, weight.options());
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*token*/) {
    const LayerPtr layer = saved_layer(context);
    const torch::Tensor gradient = std::exchange(layer->gradient, {});
    const torch::Tensor input = std::exchange(layer->input, {});
    return {gradient.t().mm(input), gradient.sum(0), {}};
  }
};

struct Apply : Function<Apply> {
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& /*token*/, const LayerPtr& layer) {
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    context->save_for_backward({x});
    return at::linear(x, layer->weight, layer->bias);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_first_order();
    const LayerPtr layer = saved_layer(context);
    layer->gradient = gradients[0];
    layer->input = context->get_saved_variables()[0];
    torch::Tensor of_input;
    if (context->needs_input_grad(0)) of_input = gradients[0].mm(layer->weight);
    return {of_input, at::zeros({1}, gradients[0].options()), {}};
  }
};

std::int64_t top_inputs(const DlrmOptions& options) {
  const auto n = static_cast<std::int64_t>(options.features.size());
  if (options.interaction == Interaction::kCross) return (n + 1) * options.embedding_dim;
  return options.embedding_dim + n * (n + 1) / 2;
}

}  // namespace

Perceptron::Perceptron(std::int64_t num_inputs, const std::vector<std::int64_t>& widths,
                       bool relu_at_end)
    : relu_at_end_(relu_at_end) {
  for (const std::int64_t width : widths) {
    TESSERA_CHECK_VALUE(width > 0, "dlrm: a layer of ", width, " outputs was asked for.");
    layers_.push_back(
        register_module("layer_" + std::to_string(layers_.size()), linear(num_inputs, width)));
    num_inputs = width;
  }
}

std::function<torch::Tensor(torch::Tensor)> Perceptron::weights_later() {
  // Autocast has casts of its own to record.
  const at::DeviceType device = layers_.front()->weight.device().type();
  if (!at::GradMode::is_enabled() || at::autocast::is_autocast_enabled(device)) {
    return [this](torch::Tensor x) { return forward(std::move(x)); };
  }
  std::vector<std::pair<torch::Tensor, LayerPtr>> layers;
  for (const torch::nn::Linear& linear : layers_) {
    auto layer = c10::make_intrusive<Layer>();
    torch::Tensor token = Weights::apply(linear->weight, linear->bias, layer);
    layers.emplace_back(std::move(token), std::move(layer));
  }
  return [layers = std::move(layers), relu_at_end = relu_at_end_](torch::Tensor x) {
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = Apply::apply(x, layers[i].first, layers[i].second);
      if (i + 1 < layers.size() || relu_at_end) x = at::relu_(x);
    }
    return x;
  };
}

torch::Tensor Perceptron::forward(torch::Tensor x) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    x = layers_[i]->forward(x);
    if (i + 1 < layers_.size() || relu_at_end_) x = at::relu_(x);
  }
  return x;
}

LowRankCross::LowRankCross(std::int64_t width, std::int64_t rank, std::int64_t num_layers) {
  TESSERA_CHECK_VALUE(width > 0 && rank > 0 && num_layers > 0, "dlrm: ", num_layers,
                      " cross layers of width ", width, " and rank ", rank, " were asked for.");
  for (std::int64_t i = 0; i < num_layers; ++i) {
    down_.push_back(register_module("down_" + std::to_string(i), linear(width, rank, false)));
    up_.push_back(register_module("up_" + std::to_string(i), linear(rank, width)));
  }
}

torch::Tensor LowRankCross::forward(const torch::Tensor& x0) {
  torch::Tensor x = x0;
  for (std::size_t i = 0; i < down_.size(); ++i) {
    x = at::addcmul(x, x0, up_[i]->forward(down_[i]->forward(x)));
  }
  return x;
}

Dlrm::Dlrm(const DlrmOptions& options) : options_(options) {
  TESSERA_CHECK_VALUE(!options.features.empty() && !options.bottom.empty() && !options.top.empty(),
                      "dlrm: features, bottom and top layers must not be empty.");
  TESSERA_CHECK_VALUE(options.bottom.back() == options.embedding_dim,
                      "dlrm: the last bottom layer has ", options.bottom.back(),
                      " outputs, the embeddings have ", options.embedding_dim,
                      " columns; both must be equal.");
  TESSERA_CHECK_VALUE(options.top.back() == 1, "dlrm: the last top layer has ", options.top.back(),
                      " outputs; it must have 1.");
  bottom_ = register_module("bottom",
                            std::make_shared<Perceptron>(options.num_dense, options.bottom, true));
  const std::int64_t inputs = top_inputs(options);
  if (options.interaction == Interaction::kCross) {
    cross_ = register_module(
        "cross", std::make_shared<LowRankCross>(inputs, options.cross_rank, options.cross_layers));
  }
  top_ = register_module("top", std::make_shared<Perceptron>(inputs, options.top, false));
  TESSERA_CHECK_VALUE(options.dims.empty() || options.dims.size() == options.features.size(),
                      "dlrm: ", options.dims.size(), " widths of tables were named for ",
                      options.features.size(), " features.");
  for (std::size_t i = 0; i < options.dims.size(); ++i) {
    TESSERA_CHECK_VALUE(options.dims[i] > 0, "dlrm: the table of feature '", options.features[i],
                        "' has ", options.dims[i], " columns.");
    if (options.dims[i] == options.embedding_dim) continue;
    projections_.resize(options.features.size());
    projections_[i] = register_module("projection_" + std::to_string(i),
                                      linear(options.dims[i], options.embedding_dim, false));
  }
  draw_parameters(*this, options.seed);
}

// Where the features lie among the keys: sharded tables give them in the order of the ranks.
std::vector<std::int64_t> Dlrm::order_of(const std::vector<std::string>& keys) const {
  std::vector<std::int64_t> order;
  for (const std::string& feature : options_.features) {
    const auto found = std::find(keys.begin(), keys.end(), feature);
    TESSERA_CHECK_INDEX(found != keys.end(), "dlrm: the embeddings have no feature '", feature,
                        "'.");
    order.push_back(found - keys.begin());
  }
  return order;
}

std::int64_t Dlrm::dim_of(std::size_t feature) const {
  return options_.dims.empty() ? options_.embedding_dim : options_.dims[feature];
}

// Side by side in the order of the features.
torch::Tensor Dlrm::in_one_width(const jagged::KeyedTensor& embeddings) const {
  const auto together = jagged::KeyedTensor::regroup({embeddings}, {options_.features}).front();
  if (projections_.empty()) return together;
  std::vector<torch::Tensor> parts = together.split_with_sizes(options_.dims, 1);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (projections_[i] != nullptr) parts[i] = projections_[i]->forward(parts[i]);
  }
  return at::cat(parts, 1);
}

torch::Tensor Dlrm::forward(const torch::Tensor& dense, const jagged::KeyedTensor& embeddings) {
  return forward(dense, comm::LazyNoWait<jagged::KeyedTensor>(embeddings));
}

torch::Tensor Dlrm::forward(const torch::Tensor& dense,
                            const comm::LazyAwaitable<jagged::KeyedTensor>& pending) {
  TESSERA_CHECK_VALUE(dense.dim() == 2 && dense.size(1) == options_.num_dense,
                      "dlrm: dense has shape ", dense.sizes(), "; it must be [batch, ",
                      options_.num_dense, "].");
  // Before the embeddings are waited for: they travel meanwhile. Backward takes what was made last
  // first, so their gradients travel while those of the bottom layers are computed.
  const auto top = top_->weights_later();
  const torch::Tensor first = bottom_->forward(dense);
  const jagged::KeyedTensor& embeddings = pending.wait();
  const std::vector<std::int64_t> order = order_of(embeddings.keys());
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t columns = embeddings.length_per_key()[static_cast<std::size_t>(order[i])];
    TESSERA_CHECK_VALUE(columns == dim_of(i), "dlrm: feature '", options_.features[i], "' has ",
                        columns, " columns; the model takes ", dim_of(i), ".");
  }
  torch::Tensor mixed;
  if (cross_ != nullptr) {
    mixed = cross_->forward(at::cat({first, in_one_width(embeddings)}, 1));
  } else if (projections_.empty()) {
    mixed = dot_interaction(first, embeddings.values(), order);
  } else {
    mixed = dot_interaction(first, in_one_width(embeddings));
  }
  return top(mixed).squeeze(1);
}

std::int64_t Dlrm::num_parameters() const {
  std::int64_t sum = 0;
  for (const auto& parameter : parameters()) sum += parameter.numel();
  return sum;
}

}  // namespace tessera::workloads::dlrm
