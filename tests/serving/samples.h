// A small model as a checkpoint, and what it must predict, by plain loops in double.

#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tessera/checkpoint/reader.h"
#include "tessera/checkpoint/writer.h"
#include "tessera/serving/model.h"

namespace tessera::serving {

using Tensor = std::vector<float>;

/// A folder that goes at the end.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "tessera-serving-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

struct SmallModel {
  static constexpr std::int64_t kDim = 8;
  bool is_cross;
  std::vector<std::int64_t> bottom = {5, 12, kDim};
  std::vector<std::int64_t> top;
  std::vector<std::int64_t> rows = {30, 7, 100};  // of tables t_0, t_1, t_2
  std::int64_t cross_layers = 2;
  std::int64_t cross_rank = 4;
  std::map<std::string, std::pair<std::vector<std::int64_t>, Tensor>> tensors;

  explicit SmallModel(bool is_cross = false) : is_cross(is_cross) {
    const std::int64_t mixed = is_cross ? 4 * kDim : kDim + 6;
    top = {mixed, 10, 1};
    add_layers("model.bottom", bottom);
    add_layers("model.top", top);
    for (std::int64_t i = 0; is_cross && i < cross_layers; ++i) {
      const std::string number = std::to_string(i);
      add("model.cross.down_" + number + ".weight", {cross_rank, mixed});
      add("model.cross.up_" + number + ".weight", {mixed, cross_rank});
      add("model.cross.up_" + number + ".bias", {mixed});
    }
    for (std::size_t t = 0; t < rows.size(); ++t) {
      add("tables.embedding_bags.t_" + std::to_string(t) + ".weight", {rows[t], kDim});
    }
  }

  void add(const std::string& name, std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    std::mt19937 random(static_cast<unsigned>(tensors.size()) + 1);
    std::normal_distribution<float> normal(0, 0.5F);
    Tensor values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(random);
    tensors[name] = {std::move(shape), std::move(values)};
  }
  void add_layers(const std::string& name, const std::vector<std::int64_t>& widths) {
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      const std::string layer = name + ".layer_" + std::to_string(i);
      add(layer + ".weight", {widths[i + 1], widths[i]});
      add(layer + ".bias", {widths[i + 1]});
    }
  }
  Tensor& table(int number) {
    return tensors["tables.embedding_bags.t_" + std::to_string(number) + ".weight"].second;
  }

  /// Cut by rows for two ranks, as a job saves it.
  void save(const std::string& root, std::int64_t step,
            const checkpoint::Values& values = {}) const {
    std::vector<std::vector<checkpoint::Part>> parts(2);
    for (const auto& [name, tensor] : tensors) {
      const auto& [shape, data] = tensor;
      const std::int64_t half = shape[0] / 2;
      const std::size_t width = data.size() / static_cast<std::size_t>(shape[0]);
      for (const int rank : {0, 1}) {
        checkpoint::Part part;
        part.name = name;
        part.shape = shape;
        part.region.offsets.assign(shape.size(), 0);
        part.region.offsets[0] = rank == 0 ? 0 : half;
        part.region.lengths = shape;
        part.region.lengths[0] = rank == 0 ? half : shape[0] - half;
        part.data = reinterpret_cast<const std::byte*>(
            data.data() + static_cast<std::size_t>(part.region.offsets[0]) * width);
        if (part.region.lengths[0] > 0) parts[static_cast<std::size_t>(rank)].push_back(part);
      }
    }
    checkpoint::save_parts(root, step, parts, values);
  }

  using Vector = std::vector<double>;
  Vector apply(const std::string& name, std::size_t num_layers, Vector x, bool relu_at_end) const {
    for (std::size_t i = 0; i < num_layers; ++i) {
      const std::string layer = name + ".layer_" + std::to_string(i);
      x = linear(layer, x);
      if (i + 1 == num_layers && !relu_at_end) continue;
      for (double& value : x) value = std::max(value, 0.0);
    }
    return x;
  }
  Vector linear(const std::string& layer, const Vector& x) const {
    const auto& [shape, weight] = tensors.at(layer + ".weight");
    const auto bias = tensors.find(layer + ".bias");
    Vector y(static_cast<std::size_t>(shape[0]));
    for (std::size_t o = 0; o < y.size(); ++o) {
      y[o] = bias == tensors.end() ? 0.0 : bias->second.second[o];
      for (std::size_t i = 0; i < x.size(); ++i) y[o] += x[i] * weight[o * x.size() + i];
    }
    return y;
  }
  static double dot(const Vector& a, const Vector& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }

  /// The logit of one sample.
  double predict(const std::vector<float>& dense, const std::vector<std::vector<std::int64_t>>& ids,
                 const std::vector<std::vector<float>>& weights = {}) const {
    std::vector<Vector> vectors = {apply("model.bottom", 2, {dense.begin(), dense.end()}, true)};
    for (std::size_t t = 0; t < rows.size(); ++t) {
      Vector sum(kDim);
      const auto& table =
          tensors.at("tables.embedding_bags.t_" + std::to_string(t) + ".weight").second;
      for (std::size_t k = 0; k < ids[t].size(); ++k) {
        for (std::size_t c = 0; c < kDim; ++c) {
          const double weight = weights.empty() ? 1.0 : weights[t][k];
          sum[c] += weight * table[static_cast<std::size_t>(ids[t][k]) * kDim + c];
        }
      }
      vectors.push_back(sum);
    }
    Vector mixed = vectors[0];
    if (is_cross) {
      for (std::size_t i = 1; i < vectors.size(); ++i) {
        mixed.insert(mixed.end(), vectors[i].begin(), vectors[i].end());
      }
      const Vector first = mixed;
      for (std::int64_t i = 0; i < cross_layers; ++i) {
        const std::string number = std::to_string(i);
        const Vector up =
            linear("model.cross.up_" + number, linear("model.cross.down_" + number, mixed));
        for (std::size_t j = 0; j < mixed.size(); ++j) mixed[j] += first[j] * up[j];
      }
    } else {
      for (std::size_t i = 1; i < vectors.size(); ++i) {
        for (std::size_t j = 0; j < i; ++j) mixed.push_back(dot(vectors[i], vectors[j]));
      }
    }
    return apply("model.top", 2, mixed, false)[0];
  }
};

/// Samples with bags of 0 to 4 ids.
struct Samples {
  std::int64_t num_samples;
  std::vector<float> dense;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<std::vector<std::int32_t>> lengths;
  std::vector<std::vector<float>> weights;

  Samples(const SmallModel& model, std::int64_t num_samples, unsigned seed = 3)
      : num_samples(num_samples), ids(3), lengths(3), weights(3) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < num_samples * model.bottom[0]; ++i)
      dense.push_back(normal(random));
    for (std::size_t f = 0; f < 3; ++f) {
      for (std::int64_t s = 0; s < num_samples; ++s) {
        lengths[f].push_back(static_cast<std::int32_t>(random() % 5));
        for (int k = 0; k < lengths[f].back(); ++k) {
          ids[f].push_back(
              static_cast<std::int64_t>(random() % static_cast<unsigned>(model.rows[f])));
          weights[f].push_back(normal(random));
        }
      }
    }
  }
  std::vector<FeatureBags> bags(bool is_weighted = false) const {
    std::vector<FeatureBags> bags;
    for (std::size_t f = 0; f < 3; ++f) {
      bags.push_back({ids[f], lengths[f],
                      is_weighted ? std::span<const float>(weights[f]) : std::span<const float>()});
    }
    return bags;
  }
  /// One of them by itself.
  Samples alone(const SmallModel& model, std::int64_t sample) const {
    Samples one(model, 0);
    one.num_samples = 1;
    const auto width = static_cast<std::size_t>(model.bottom[0]);
    const auto s = static_cast<std::size_t>(sample);
    one.dense.assign(dense.begin() + static_cast<std::ptrdiff_t>(s * width),
                     dense.begin() + static_cast<std::ptrdiff_t>((s + 1) * width));
    for (std::size_t f = 0; f < 3; ++f) {
      std::size_t begin = 0;
      for (std::size_t i = 0; i < s; ++i) begin += static_cast<std::size_t>(lengths[f][i]);
      one.lengths[f] = {lengths[f][s]};
      for (std::int32_t k = 0; k < lengths[f][s]; ++k) {
        one.ids[f].push_back(ids[f][begin + static_cast<std::size_t>(k)]);
        one.weights[f].push_back(weights[f][begin + static_cast<std::size_t>(k)]);
      }
    }
    return one;
  }
};

inline ExportReport export_model(const SmallModel& model, const Folder& folder,
                                 const ExportOptions& options = {},
                                 const std::string& name = "pkg") {
  const std::string root = folder / ("checkpoints-" + name);
  std::filesystem::remove_all(root);
  model.save(root, 40);
  return write_package(checkpoint::Reader(root, 40), folder / name, options);
}

}  // namespace tessera::serving
