#include "dlrm/click_log.h"

#include <algorithm>

namespace tessera::workloads::dlrm {

bool any_grows(const ClickSchema& schema) {
  return std::any_of(schema.features.begin(), schema.features.end(),
                     [](const Feature& feature) { return feature.grows(); });
}

std::vector<Feature> equal_features(std::int64_t count, std::int64_t num_rows,
                                    std::int64_t bag_size, const std::string& prefix) {
  std::vector<Feature> features;
  features.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    features.push_back({prefix + std::to_string(i), num_rows, bag_size});
  }
  return features;
}

void check_range(const ClickLog& log, std::int64_t first, std::int64_t count,
                 const std::string& name) {
  const std::int64_t size = log.num_samples();
  if (first < 0 || count < 0 || (size >= 0 && first > size - count)) {
    throw DataError(name + ": samples [" + std::to_string(first) + ", " +
                    std::to_string(first + count) + ") were asked for, it holds " +
                    (size < 0 ? std::string("0 and up") : std::to_string(size)) + ".");
  }
}

void ClickLog::gather(std::span<const std::int64_t> samples, SampleBlock& block) const {
  const std::size_t num_features = schema().features.size();
  block.num_samples = static_cast<std::int64_t>(samples.size());
  block.labels.clear();
  block.dense.clear();
  block.lengths.resize(num_features * samples.size());
  std::vector<std::vector<std::int64_t>> ids(num_features);
  SampleBlock one;
  for (std::size_t s = 0; s < samples.size(); ++s) {
    read(samples[s], 1, one);
    block.labels.push_back(one.labels[0]);
    block.dense.insert(block.dense.end(), one.dense.begin(), one.dense.end());
    const std::int64_t* next = one.ids.data();
    for (std::size_t f = 0; f < num_features; ++f) {
      block.lengths[f * samples.size() + s] = one.lengths[f];
      ids[f].insert(ids[f].end(), next, next + one.lengths[f]);
      next += one.lengths[f];
    }
  }
  block.ids.clear();
  for (const auto& of_feature : ids) {
    block.ids.insert(block.ids.end(), of_feature.begin(), of_feature.end());
  }
}

void ClickLog::expect(std::int64_t /*first*/, std::int64_t /*count*/) const {}

}  // namespace tessera::workloads::dlrm
