#include "gnn/model.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "gnn/lennard_jones.h"
#include "tessera/graph_parallel/halo.h"
#include "tessera/graph_parallel/neighbour_sum.h"
#include "tessera/regions/regions.h"

namespace tessera::workloads::gnn {
namespace {

using graph_parallel::HaloPlan;

// Bumps of even width over the range of distances, fading out at the cutoff.
at::Tensor radial_basis(const at::Tensor& distances, const ModelOptions& options) {
  const double width = options.cutoff / static_cast<double>(options.num_basis);
  const at::Tensor centres =
      (at::arange(options.num_basis, distances.options().requires_grad(false)) + 0.5) * width;
  const at::Tensor bumps = (-((distances.unsqueeze(1) - centres) / width).pow(2)).exp();
  return bumps * envelope(distances, options.cutoff).unsqueeze(1);
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return at::addmm(bias, x, weight);
}

at::Tensor aggregate(const at::Tensor& h, const at::Tensor& filters, const LocalGraph& graph,
                     bool overlap) {
  const at::Tensor inner = filters.narrow(0, 0, graph.num_interior);
  const at::Tensor outer = filters.slice(0, graph.num_interior);
  if (overlap) {
    graph_parallel::PendingRows pending = graph_parallel::halo_exchange_async(h, graph.plan);
    const at::Tensor sums = graph_parallel::neighbour_sum(h, graph.interior, inner);
    return sums + graph_parallel::neighbour_sum(pending.finish(), graph.boundary, outer);
  }
  const at::Tensor halo = graph_parallel::halo_exchange(h, graph.plan);
  return graph_parallel::neighbour_sum(h, graph.interior, inner) +
         graph_parallel::neighbour_sum(halo, graph.boundary, outer);
}

}  // namespace

LocalGraph make_local_graph(const Structure& structure, const graph_parallel::Partition& partition,
                            const comm::Group& group, const graph_parallel::HaloOptions& options) {
  const at::Tensor& all = structure.neighbours.edge_index;
  const at::Tensor mine = graph_parallel::edges_of_part(all, partition, group.rank());
  const HaloPlan plan(partition, all.index_select(1, mine), group, options);
  const std::int64_t num_owned = plan.num_owned();
  const at::Tensor inside = plan.local_edges().index_select(1, plan.interior());
  at::Tensor outside = plan.local_edges().index_select(1, plan.boundary());
  outside[0].sub_(num_owned);  // rows of the halo
  LocalGraph graph{plan, graph_parallel::Adjacency(inside, num_owned, num_owned),
                   graph_parallel::Adjacency(outside, plan.num_halo(), num_owned)};
  const at::Tensor order = at::cat({plan.interior(), plan.boundary()});
  graph.num_atoms = structure.num_atoms();
  graph.nodes = graph.plan.nodes();
  graph.types = structure.types.index_select(0, partition.nodes_of(group.rank()));
  graph.edges = graph.plan.local_edges().index_select(1, order);
  graph.shifts = structure.neighbours.shifts.index_select(0, mine.index_select(0, order));
  graph.num_interior = graph.plan.interior().size(0);
  graph.mean_degree =
      std::max(1.0, static_cast<double>(all.size(1)) / static_cast<double>(structure.num_atoms()));
  return graph;
}

Model::Model(const ModelOptions& options, std::uint64_t seed) : options_(options) {
  const std::int64_t width = options.num_features;
  std::int64_t total = 0;
  const auto add = [&](std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    slots_.push_back({std::move(shape), total});
    total += count;
  };
  add({options.num_types, width});
  for (std::int64_t layer = 0; layer < options.num_layers; ++layer) {
    add({options.num_basis, width});  // filter
    add({width});
    add({width, width});
    add({width});
    add({width, width});  // update
    add({width});
    add({width, width});
    add({width});
  }
  add({width, width});  // atomic energy
  add({width});
  add({width, 1});
  add({1});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  // Drawn in double, so that all precisions start from the same numbers.
  at::Tensor values = at::randn({total}, generator, at::TensorOptions(at::kDouble));
  for (const Slot& slot : slots_) {
    const bool is_bias = slot.shape.size() == 1;
    std::int64_t count = 1;
    for (const std::int64_t extent : slot.shape) count *= extent;
    values.narrow(0, slot.first, count)
        .mul_(is_bias ? 0.0 : 1.0 / std::sqrt(static_cast<double>(slot.shape[0])));
  }
  parameters_ = values.to(options.device, options.dtype).requires_grad_(true);
}

std::vector<at::Tensor> Model::views_of(const at::Tensor& flat) const {
  std::vector<at::Tensor> views;
  for (const Slot& slot : slots_) {
    std::int64_t count = 1;
    for (const std::int64_t extent : slot.shape) count *= extent;
    views.push_back(flat.narrow(0, slot.first, count).view(slot.shape));
  }
  return views;
}

at::Tensor Model::energy(const LocalGraph& graph, const at::Tensor& positions,
                         const at::Tensor& cell, const at::Tensor& strain) const {
  const comm::Group& group = graph.plan.group();
  const auto parameters = views_of(regions::copy(parameters_, group));
  const at::Tensor deform =
      at::eye(3, strain.options().requires_grad(false)) + regions::copy(strain, group);
  const at::Tensor places =
      regions::copy(positions, group).index_select(0, graph.nodes).matmul(deform);
  const at::Tensor vectors = places.index_select(0, graph.edges[0]) -
                             places.index_select(0, graph.edges[1]) +
                             graph.shifts.to(cell.scalar_type()).matmul(cell).matmul(deform);
  // Geometry in the positions' precision, the network in its own.
  const at::Tensor distances = vectors.pow(2).sum(1).sqrt();
  const at::Tensor basis = radial_basis(distances, options_).to(options_.dtype);

  std::size_t next = 0;
  const auto take = [&]() -> const at::Tensor& { return parameters[next++]; };
  at::Tensor h = take().index_select(0, graph.types);
  for (std::int64_t layer = 0; layer < options_.num_layers; ++layer) {
    const at::Tensor &f1 = take(), &f1b = take(), &f2 = take(), &f2b = take();
    const at::Tensor &u1 = take(), &u1b = take(), &u2 = take(), &u2b = take();
    // The envelope once more behind the biases: an edge fades out with all its derivatives.
    const at::Tensor fade = envelope(distances, options_.cutoff).to(options_.dtype).unsqueeze(1);
    const at::Tensor filters = linear(at::silu(linear(basis, f1, f1b)), f2, f2b) * fade;
    const at::Tensor sums =
        aggregate(h, filters, graph, options_.overlap) / std::sqrt(graph.mean_degree);
    h = h + linear(at::silu(linear(sums, u1, u1b)), u2, u2b);
  }
  const at::Tensor &e1 = take(), &e1b = take(), &e2 = take(), &e2b = take();
  const at::Tensor atomic = linear(at::silu(linear(h, e1, e1b)), e2, e2b);
  return regions::reduce(atomic.to(at::kDouble).sum(), group);
}

Prediction Model::predict(const LocalGraph& graph, const at::Tensor& positions,
                          const at::Tensor& cell, bool with_stress, bool create_graph) const {
  const at::Tensor places = positions.requires_grad() && create_graph
                                ? positions
                                : positions.detach().requires_grad_(true);
  const at::Tensor strain = at::zeros({3, 3}, places.options()).requires_grad_(with_stress);
  Prediction result;
  result.energy = energy(graph, places, cell, strain);
  std::vector<at::Tensor> inputs{places};
  if (with_stress) inputs.push_back(strain);
  const auto grads = torch::autograd::grad({result.energy}, inputs, {}, std::nullopt, create_graph);
  result.forces = -grads[0];
  if (with_stress) result.stress = grads[1] / at::det(cell).abs();
  if (!create_graph) result.energy = result.energy.detach();
  return result;
}

}  // namespace tessera::workloads::gnn
