// src/sharding/sizes.h — sums of numbers per rank or per feature.

#pragma once

#include <numeric>

#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {

inline std::int64_t total(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
}

}  // namespace tessera::sharding
