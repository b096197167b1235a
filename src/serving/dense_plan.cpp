#include "serving/dense_plan.h"

#include <algorithm>

#include "kernels/dense_layer.h"
#include "serving/model_info.h"

namespace tessera::serving {
namespace {

constexpr std::int64_t kWide = kernels::kDenseBlock;

std::size_t padded(std::int64_t num_outputs) {
  return static_cast<std::size_t>((num_outputs + kWide - 1) / kWide * kWide);
}

// Gives a layer its place behind the others; blocks begin at cache lines.
PlacedLayer placed(std::string name, bool has_bias, std::int64_t num_inputs,
                   std::int64_t num_outputs, bool has_relu, std::size_t& end) {
  PlacedLayer layer;
  layer.weight = name + ".weight";
  if (has_bias) layer.bias = name + ".bias";
  layer.num_inputs = num_inputs;
  layer.num_outputs = num_outputs;
  layer.has_relu = has_relu;
  layer.weights_at = end;
  end += padded(num_outputs) * static_cast<std::size_t>(num_inputs);
  layer.bias_at = end;
  end += padded(num_outputs);
  return layer;
}

std::vector<PlacedLayer> perceptron(const std::string& name,
                                    const std::vector<std::int64_t>& widths, bool relu_at_end,
                                    std::size_t& end) {
  std::vector<PlacedLayer> layers;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    layers.push_back(placed(name + ".layer_" + std::to_string(i), true, widths[i], widths[i + 1],
                            i + 2 < widths.size() || relu_at_end, end));
  }
  return layers;
}

void pack_layer(const PlacedLayer& layer, const DensePlan::Find& find, float* block) {
  float* weights = block + layer.weights_at;
  float* bias = block + layer.bias_at;
  std::fill(weights, bias + padded(layer.num_outputs), 0.0F);
  const std::span<const float> from = find(layer.weight);
  for (std::int64_t o = 0; o < layer.num_outputs; ++o) {
    float* to = weights + o / kWide * kWide * layer.num_inputs + o % kWide;
    const float* row = from.data() + o * layer.num_inputs;
    for (std::int64_t i = 0; i < layer.num_inputs; ++i) to[i * kWide] = row[i];
  }
  if (layer.bias.empty()) return;
  const std::span<const float> biases = find(layer.bias);
  std::copy(biases.begin(), biases.end(), bias);
}

}  // namespace

void PlacedLayer::apply(const float* block, const float* input, std::int64_t stride,
                        std::int64_t num_samples, float* output, std::int64_t output_stride) const {
  kernels::DenseLayer layer;
  layer.weights = block + weights_at;
  layer.bias = block + bias_at;
  layer.num_inputs = num_inputs;
  layer.num_outputs = num_outputs;
  layer.has_relu = has_relu;
  kernels::dense_layer_kernels().apply(layer, input, stride, num_samples, output, output_stride);
}

DensePlan::DensePlan(const ModelInfo& model) {
  bottom = perceptron("bottom", model.bottom, true, num_floats);
  const std::int64_t mixed = mixed_width(model);
  for (std::int64_t i = 0; i < model.cross_layers; ++i) {
    const std::string number = std::to_string(i);
    down.push_back(
        placed("cross.down_" + number, false, mixed, model.cross_rank, false, num_floats));
    up.push_back(placed("cross.up_" + number, true, model.cross_rank, mixed, false, num_floats));
  }
  top = perceptron("top", model.top, false, num_floats);
  widest = std::max({mixed, model.bottom.back(), model.cross_rank});
  for (const auto* widths : {&model.bottom, &model.top}) {
    widest = std::max(widest, *std::max_element(widths->begin(), widths->end()));
  }
}

void DensePlan::pack(const Find& find, float* block) const {
  for (const auto* layers : {&bottom, &down, &up, &top}) {
    for (const PlacedLayer& layer : *layers) pack_layer(layer, find, block);
  }
}

}  // namespace tessera::serving
