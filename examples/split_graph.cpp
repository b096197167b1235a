// Splits a ring of nodes over the ranks, passes messages around it, and differentiates the energy.
// Every rank gets the forces of all nodes, the same as one process would.
//
//   tessera run -n 2 -- build/release/bin/split_graph

#include <cstdio>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/comm/group.h"
#include "tessera/graph_parallel/halo.h"
#include "tessera/regions/regions.h"

int main() {
  using namespace tessera;
  const comm::Group world = comm::init();
  constexpr std::int64_t kNodes = 12;

  // Each node hears from its two neighbours on the ring.
  const at::Tensor ids = at::arange(kNodes);
  const at::Tensor edges = at::cat({at::stack({ids, (ids + 1).remainder(kNodes)}),
                                    at::stack({(ids + 1).remainder(kNodes), ids})},
                                   1);
  const auto partition = graph_parallel::Partition::contiguous(kNodes, world.size());
  const at::Tensor mine = graph_parallel::edges_of_part(edges, partition, world.rank());
  const graph_parallel::HaloPlan plan(partition, edges.index_select(1, mine), world,
                                      {.is_symmetric = true});

  const at::Tensor positions = ids.to(at::kDouble).unsqueeze(1).requires_grad_(true);
  at::Tensor h = regions::copy(positions, world).index_select(0, partition.nodes_of(world.rank()));
  for (int layer = 0; layer < 2; ++layer) {
    const at::Tensor rows = graph_parallel::halo_extend(h.sin(), plan);
    h = h + at::zeros_like(h).index_add(0, plan.local_edges()[1],
                                        rows.index_select(0, plan.local_edges()[0]));
  }
  const at::Tensor energy = regions::reduce(h.pow(2).sum(), world);
  const at::Tensor forces = -torch::autograd::grad({energy}, {positions})[0];
  if (world.rank() == 0) {
    std::printf("energy %.6f, largest force %.6f, %d ranks, %ld halo rows\n", energy.item<double>(),
                forces.abs().max().item<double>(), world.size(),
                static_cast<long>(plan.num_halo()));
  }
}
