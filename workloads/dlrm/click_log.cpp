#include "dlrm/click_log.h"

namespace tessera::workloads::dlrm {

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

void ClickLog::expect(std::int64_t /*first*/, std::int64_t /*count*/) const {}

}  // namespace tessera::workloads::dlrm
