#include "tessera/serving/model.h"

#include <algorithm>
#include <cmath>
#include <mutex>

#include "kernels/dense_layer.h"
#include "kernels/pair_products.h"
#include "serving/model_info.h"
#include "tessera/checkpoint/error.h"

namespace tessera::serving {
namespace {

// Samples that are computed at a time: their numbers between two layers stay in the cache.
constexpr std::int64_t kBlock = 64;

// A linear layer in the layout of its kernel.
class Layer {
 public:
  Layer(std::span<const float> weight, std::span<const float> bias, std::int64_t num_inputs,
        std::int64_t num_outputs, bool has_relu) {
    layer_.num_inputs = num_inputs;
    layer_.num_outputs = num_outputs;
    layer_.has_relu = has_relu;
    constexpr std::int64_t kWide = kernels::kDenseBlock;
    const std::int64_t padded = layer_.num_blocks() * kWide;
    weights_.resize(static_cast<std::size_t>(padded * num_inputs));
    bias_.resize(static_cast<std::size_t>(padded));
    std::copy(bias.begin(), bias.end(), bias_.begin());
    for (std::int64_t o = 0; o < num_outputs; ++o) {
      float* to = weights_.data() + o / kWide * kWide * num_inputs + o % kWide;
      const float* from = weight.data() + o * num_inputs;
      for (std::int64_t i = 0; i < num_inputs; ++i) to[i * kWide] = from[i];
    }
  }

  std::int64_t num_outputs() const { return layer_.num_outputs; }

  void apply(const float* input, std::int64_t stride, std::int64_t num_samples, float* output,
             std::int64_t output_stride) const {
    kernels::DenseLayer layer = layer_;
    layer.weights = weights_.data();
    layer.bias = bias_.data();
    kernels::dense_layer_kernels().apply(layer, input, stride, num_samples, output, output_stride);
  }

 private:
  kernels::DenseLayer layer_;
  std::vector<float> weights_;
  std::vector<float> bias_;
};

std::vector<Layer> perceptron(const Package& package, const std::string& name,
                              const std::vector<std::int64_t>& widths, bool relu_at_end) {
  std::vector<Layer> layers;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
    const std::string layer = name + ".layer_" + std::to_string(i);
    layers.emplace_back(package.dense(layer + ".weight"), package.dense(layer + ".bias"), widths[i],
                        widths[i + 1], i + 2 < widths.size() || relu_at_end);
  }
  return layers;
}

[[noreturn]] void refuse(const std::string& what, const std::string& where,
                         bool is_malformed = false) {
  throw BadRequest(what, where, is_malformed);
}

std::string place(const std::string& input, std::int64_t index) {
  return input + "[" + std::to_string(index) + "]";
}

void grow(std::vector<float>& numbers, std::int64_t count) {
  if (numbers.size() < static_cast<std::size_t>(count)) {
    numbers.resize(static_cast<std::size_t>(count));
  }
}

}  // namespace

BadRequest::~BadRequest() = default;

float sigmoid(float x) noexcept { return 1.0F / (1.0F + std::exp(-x)); }

struct Model::Version {
  explicit Version(const std::string& path, bool verifies) : package(path, verifies) {
    const ModelInfo& model = package.model();
    bottom = perceptron(package, "bottom", model.bottom, true);
    top = perceptron(package, "top", model.top, false);
    const std::int64_t mixed = mixed_width(model);
    for (std::int64_t i = 0; i < model.cross_layers; ++i) {
      const std::string number = std::to_string(i);
      down.emplace_back(package.dense("cross.down_" + number + ".weight"), std::span<float>(),
                        mixed, model.cross_rank, false);
      up.emplace_back(package.dense("cross.up_" + number + ".weight"),
                      package.dense("cross.up_" + number + ".bias"), model.cross_rank, mixed,
                      false);
    }
    const std::int64_t dim = model.bottom.back();
    for (std::size_t i = 0; i < model.features.size(); ++i) {
      parts.push_back(static_cast<std::int64_t>(i) * dim);
      tables.push_back(package.table(model.features[i].table));
    }
    widest = std::max({mixed, dim, model.cross_rank});
    for (const auto* widths : {&model.bottom, &model.top}) {
      widest = std::max(widest, *std::max_element(widths->begin(), widths->end()));
    }
  }

  Package package;
  std::vector<Layer> bottom;
  std::vector<Layer> top;
  std::vector<Layer> down;
  std::vector<Layer> up;
  std::vector<std::int64_t> parts;          // where each feature's embedding begins
  std::vector<embedding::RowTable> tables;  // of each feature
  std::int64_t widest = 0;
};

// What one prediction needs besides the model; kept for the next.
struct Model::Workspace {
  std::vector<std::int64_t> offsets;  // one more than samples, per feature
  std::vector<float> first;           // bottom's output
  std::vector<float> rows;            // embeddings
  std::vector<float> mixed;
  std::vector<float> crossed;
  std::vector<float> here;
  std::vector<float> there;

  void make_room(const Version& version, std::int64_t num_samples) {
    const ModelInfo& model = version.package.model();
    const auto count = static_cast<std::int64_t>(model.features.size());
    const auto num_offsets = static_cast<std::size_t>(count * (num_samples + 1));
    if (offsets.size() < num_offsets) offsets.resize(num_offsets);
    const std::int64_t dim = model.bottom.back();
    grow(first, kBlock * dim);
    grow(rows, kBlock * dim * count);
    for (auto* buffer : {&mixed, &crossed, &here, &there}) grow(*buffer, kBlock * version.widest);
  }
};

struct Model::State {
  mutable std::mutex mutex;
  std::shared_ptr<const Version> version;
  std::vector<std::unique_ptr<Workspace>> workspaces;
};

namespace {

// Applies layers one after the other between two buffers; returns where the result is.
const float* run_layers(const std::vector<Layer>& layers, const float* input, std::int64_t stride,
                        std::int64_t num_samples, std::vector<float>& here,
                        std::vector<float>& there) {
  for (const Layer& layer : layers) {
    layer.apply(input, stride, num_samples, here.data(), layer.num_outputs());
    input = here.data();
    stride = layer.num_outputs();
    std::swap(here, there);
  }
  return input;
}

}  // namespace

Model::Model(const std::string& path, bool verifies) : state_(std::make_unique<State>()) {
  state_->version = std::make_shared<Version>(path, verifies);
}

Model::~Model() = default;

Model::Lease Model::lease() {
  const std::lock_guard lock(state_->mutex);
  std::unique_ptr<Workspace> workspace;
  if (state_->workspaces.empty()) {
    workspace = std::make_unique<Workspace>();
  } else {
    workspace = std::move(state_->workspaces.back());
    state_->workspaces.pop_back();
  }
  return Lease(state_.get(), state_->version, std::move(workspace));
}

void Model::reload(const std::string& path, bool verifies) {
  auto version = std::make_shared<const Version>(path, verifies);
  const ModelInfo& next = version->package.model();
  std::shared_ptr<const Version> old;
  const std::lock_guard lock(state_->mutex);
  const ModelInfo& now = state_->version->package.model();
  bool is_same = now.name == next.name && now.num_dense == next.num_dense &&
                 now.features.size() == next.features.size();
  for (std::size_t i = 0; is_same && i < now.features.size(); ++i) {
    is_same = now.features[i].name == next.features[i].name;
  }
  if (!is_same) {
    throw checkpoint::Error(checkpoint::ErrorKind::kInvalid,
                            path + ": its inputs are not those of the model that is served.");
  }
  old = std::exchange(state_->version, std::move(version));
}

std::int64_t Model::mapped_bytes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->version->package.mapped_bytes();
}

Model::Lease::Lease(State* state, std::shared_ptr<const Version> version,
                    std::unique_ptr<Workspace> workspace)
    : state_(state), version_(std::move(version)), workspace_(std::move(workspace)) {}
Model::Lease::Lease(Lease&&) noexcept = default;
Model::Lease::~Lease() {
  if (workspace_ == nullptr) return;
  const std::lock_guard lock(state_->mutex);
  state_->workspaces.push_back(std::move(workspace_));
}

const ModelInfo& Model::Lease::model() const noexcept { return version_->package.model(); }

void Model::Lease::check(const Request& request) const {
  const ModelInfo& info = model();
  const auto num_samples = static_cast<std::size_t>(std::max<std::int64_t>(request.num_samples, 0));
  if (request.num_samples < 0 || request.features.size() != info.features.size()) {
    refuse("the request has " + std::to_string(request.features.size()) + " features, the model " +
               std::to_string(info.features.size()),
           "inputs");
  }
  if (request.dense.size() != num_samples * static_cast<std::size_t>(info.num_dense)) {
    refuse("dense has " + std::to_string(request.dense.size()) + " numbers; " +
               std::to_string(num_samples) + " samples of " + std::to_string(info.num_dense) +
               " are needed",
           "dense");
  }
  for (std::size_t i = 0; i < request.dense.size(); ++i) {
    if (!std::isfinite(request.dense[i])) {
      refuse("a number is not finite", place("dense", static_cast<std::int64_t>(i)));
    }
  }
  for (std::size_t f = 0; f < info.features.size(); ++f) {
    const FeatureBags& bags = request.features[f];
    const std::string& name = info.features[f].name;
    if (bags.lengths.size() != num_samples) {
      refuse("there are " + std::to_string(bags.lengths.size()) + " lengths for " +
                 std::to_string(num_samples) + " samples",
             name + ".lengths");
    }
    std::uint64_t sum = 0;
    for (std::size_t s = 0; s < num_samples; ++s) {
      if (bags.lengths[s] < 0) {
        refuse("a length is negative", place(name + ".lengths", static_cast<std::int64_t>(s)),
               true);
      }
      sum += static_cast<std::uint64_t>(bags.lengths[s]);
    }
    if (sum != bags.ids.size()) {
      refuse("the lengths sum to " + std::to_string(sum) + ", there are " +
                 std::to_string(bags.ids.size()) + " values",
             name + ".lengths", true);
    }
    const std::int64_t num_rows = version_->tables[f].num_rows;
    for (std::size_t k = 0; k < bags.ids.size(); ++k) {
      if (bags.ids[k] < 0 || bags.ids[k] >= num_rows) {
        refuse("id " + std::to_string(bags.ids[k]) + " is not one of the " +
                   std::to_string(num_rows) + " rows of table '" +
                   info.tables[info.features[f].table].name + "'",
               place(name + ".values", static_cast<std::int64_t>(k)));
      }
    }
    if (!bags.weights.empty() && bags.weights.size() != bags.ids.size()) {
      refuse("there are " + std::to_string(bags.weights.size()) + " weights for " +
                 std::to_string(bags.ids.size()) + " values",
             name + ".weights");
    }
    for (std::size_t k = 0; k < bags.weights.size(); ++k) {
      if (!std::isfinite(bags.weights[k])) {
        refuse("a weight is not finite", place(name + ".weights", static_cast<std::int64_t>(k)));
      }
    }
  }
}

void Model::Lease::predict(const Request& request, std::span<float> logits) {
  check(request);
  if (logits.size() != static_cast<std::size_t>(request.num_samples)) {
    refuse("there is room for " + std::to_string(logits.size()) + " results of " +
               std::to_string(request.num_samples) + " samples",
           "outputs");
  }
  const ModelInfo& info = model();
  const Version& version = *version_;
  Workspace& work = *workspace_;
  work.make_room(version, request.num_samples);
  const auto num_features = static_cast<std::int64_t>(info.features.size());
  const std::int64_t dim = info.bottom.back();
  const std::int64_t mixed = info.top.front();
  const std::int64_t per_feature = request.num_samples + 1;
  for (std::int64_t f = 0; f < num_features; ++f) {
    std::int64_t* offsets = work.offsets.data() + f * per_feature;
    offsets[0] = 0;
    const auto& lengths = request.features[static_cast<std::size_t>(f)].lengths;
    for (std::int64_t s = 0; s < request.num_samples; ++s) {
      offsets[s + 1] = offsets[s] + lengths[static_cast<std::size_t>(s)];
    }
  }
  for (std::int64_t begin = 0; begin < request.num_samples; begin += kBlock) {
    const std::int64_t count = std::min(kBlock, request.num_samples - begin);
    const std::int64_t stride = num_features * dim;
    for (std::size_t f = 0; f < info.features.size(); ++f) {
      const FeatureBags& bags = request.features[f];
      const std::int64_t* offsets =
          work.offsets.data() + static_cast<std::int64_t>(f) * per_feature + begin;
      embedding::pool_rows(version.tables[f],
                           {bags.ids.data(),
                            {offsets, static_cast<std::size_t>(count + 1)},
                            bags.weights.empty() ? nullptr : bags.weights.data(),
                            info.features[f].is_mean},
                           work.rows.data() + version.parts[f], stride);
    }
    const float* first = run_layers(version.bottom, request.dense.data() + begin * info.num_dense,
                                    info.num_dense, count, work.here, work.there);
    if (version.down.empty()) {
      kernels::SampleVectors vectors;
      vectors.first = first;
      vectors.first_stride = dim;
      vectors.parts = work.rows.data();
      vectors.parts_stride = stride;
      vectors.offsets = version.parts.data();
      vectors.count = num_features;
      vectors.dim = dim;
      kernels::pair_product_kernels().products(vectors, 0, count, work.mixed.data());
    } else {
      for (std::int64_t s = 0; s < count; ++s) {
        float* to = work.mixed.data() + s * mixed;
        std::copy(first + s * dim, first + (s + 1) * dim, to);
        const float* rows = work.rows.data() + s * stride;
        std::copy(rows, rows + stride, to + dim);
      }
      // x' = x0 * (W (V x) + b) + x
      std::copy(work.mixed.begin(), work.mixed.begin() + count * mixed, work.crossed.begin());
      for (std::size_t i = 0; i < version.down.size(); ++i) {
        const std::int64_t rank = version.down[i].num_outputs();
        version.down[i].apply(work.crossed.data(), mixed, count, work.here.data(), rank);
        version.up[i].apply(work.here.data(), rank, count, work.there.data(), mixed);
        for (std::int64_t j = 0; j < count * mixed; ++j) {
          work.crossed[static_cast<std::size_t>(j)] +=
              work.mixed[static_cast<std::size_t>(j)] * work.there[static_cast<std::size_t>(j)];
        }
      }
      std::swap(work.mixed, work.crossed);
    }
    const float* result =
        run_layers(version.top, work.mixed.data(), mixed, count, work.here, work.there);
    std::copy(result, result + count, logits.begin() + begin);
  }
}

}  // namespace tessera::serving
