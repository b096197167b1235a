// Two ranks, as threads, add up their tensors. Built against an installed tessera.

#include <cstdio>
#include <thread>
#include <vector>

#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <tessera/comm/collectives.h>
#include <tessera/comm/group.h>
#include <tessera/core/version.h>

int main() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<float> sums(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto group = tessera::comm::make_group(store, rank, 2);
      const at::Tensor sum =
          tessera::comm::all_reduce(at::full({1000}, static_cast<float>(rank + 1)), group);
      sums[rank] = sum.sum().item<float>();
    });
  }
  for (auto& rank : ranks) rank.join();
  std::printf("tessera %s: %.0f %.0f\n", tessera::version().c_str(), sums[0], sums[1]);
  return sums[0] == 3000 && sums[1] == 3000 ? 0 : 1;
}
