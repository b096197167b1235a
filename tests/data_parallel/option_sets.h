// tests/data_parallel/option_sets.h — options under which training must come out the same.

#pragma once

#include <vector>

#include <torch/version.h>

#include "tessera/data_parallel/options.h"

namespace tessera::testing {

struct Named {
  const char* name;
  data_parallel::Options options;
};

inline std::vector<Named> option_sets() {
  return {
      {"plain", {}},
      {"view", {.gradient_as_bucket_view = true}},
      {"small buckets", {.bucket_cap_mb = 0.0003}},
      {"small buckets, view", {.bucket_cap_mb = 0.0003, .gradient_as_bucket_view = true}},
      {"bucket list", {.bucket_cap_mb_list = {0.0001, 0.0005}}},
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
      {"batched", {.batched_grad_copy = true}},
#endif
      {"find unused", {.find_unused_parameters = true}},
      {"static", {.bucket_cap_mb = 0.0003, .static_graph = true}},
      {"automatic", {.automatic_graph = true}},
  };
}

}  // namespace tessera::testing
