// tests/graph_parallel/graphs.h — graphs for tests.

#pragma once

#include <cmath>
#include <vector>

#include <ATen/ATen.h>

namespace tessera::testing {

struct Cloud {
  at::Tensor positions;   // [nodes, 3]
  at::Tensor cell;        // [3, 3]
  at::Tensor edge_index;  // [2, edges], both directions
};

/// Random points in a periodic box of the given edges, joined below `radius`.
inline Cloud periodic_cloud(std::int64_t num_nodes, std::vector<double> lengths, double radius,
                            std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const at::Tensor box = at::tensor(lengths, at::kDouble);
  Cloud cloud;
  cloud.positions = at::rand({num_nodes, 3}, generator, at::TensorOptions(at::kDouble)) * box;
  cloud.cell = at::diag(box);
  const double* p = cloud.positions.const_data_ptr<double>();
  std::vector<std::int64_t> source;
  std::vector<std::int64_t> target;
  for (std::int64_t i = 0; i < num_nodes; ++i) {
    for (std::int64_t j = 0; j < num_nodes; ++j) {
      if (i == j) continue;
      double squared = 0;
      for (int axis = 0; axis < 3; ++axis) {
        double d = p[3 * i + axis] - p[3 * j + axis];
        d -= lengths[axis] * std::round(d / lengths[axis]);
        squared += d * d;
      }
      if (squared >= radius * radius) continue;
      source.push_back(i);
      target.push_back(j);
    }
  }
  cloud.edge_index = at::stack({at::tensor(source, at::kLong), at::tensor(target, at::kLong)});
  return cloud;
}

/// Random edges without symmetry.
inline at::Tensor random_edges(std::int64_t num_nodes, std::int64_t num_edges, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randint(0, num_nodes, {2, num_edges}, generator, at::TensorOptions(at::kLong));
}

}  // namespace tessera::testing
