// Times one layer of message passing over a split graph, forward and backward, in one run:
//
//   graph/layer/halo          rows of the boundary only, summed along edges in one pass, over
//                             shared memory
//   graph/layer/halo_gloo     the same over LibTorch's Gloo
//   graph/layer/halo_select   the same as halo, with select, multiply and add of LibTorch
//   graph/layer/gather        the reference: all rows to all ranks by a padded all-gather over
//                             Gloo, select, multiply and add. Its backward slices (and is wrong
//                             here)
//   graph/layer/gather_sum    the same with the gradients summed over ranks
//   graph/layer/alone         one process with half the nodes, nothing to exchange
//
// and what it costs to move the rows alone (graph/exchange/...), and how much of a slow exchange
// two phases hide (graph/overlap/...).
//
//   layer_bench [--ranks N] [--nodes N] [--columns N] [--seconds S]

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "gnn/neighbours.h"
#include "kernels/dispatch.h"
#include "support/rank_bench.h"
#include "support/rank_groups.h"
#include "support/row.h"
#include "support/wrapped_group.h"
#include "tessera/comm/collectives.h"
#include "tessera/graph_parallel/halo.h"
#include "tessera/graph_parallel/neighbour_sum.h"
#include "tessera/regions/regions.h"

namespace tessera::bench {
namespace {

using graph_parallel::Adjacency;
using graph_parallel::HaloPlan;
using graph_parallel::Partition;
using workloads::gnn::Box;

constexpr std::int64_t kNeighbours = 20;

struct Settings {
  std::int64_t num_nodes = 65536;
  std::int64_t num_columns = 128;
  double seconds = 1;
};

/// A graph of random points and the edges to the nearest ones, with a weight each.
struct Sample {
  at::Tensor positions;
  Box box;
  at::Tensor edge_index;
  at::Tensor weights;

  Sample(std::int64_t num_nodes, std::uint64_t seed) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const double side = std::cbrt(static_cast<double>(num_nodes));
    positions = at::rand({num_nodes, 3}, generator, at::TensorOptions(at::kDouble)) * side;
    box.cell = at::eye(3, at::kDouble) * side;
    edge_index = workloads::gnn::nearest(positions, box, kNeighbours).edge_index;
    weights = at::rand({edge_index.size(1), 1}, generator, at::TensorOptions(at::kFloat));
  }
};

/// What one rank of a split graph needs, for all variants.
struct Share {
  HaloPlan plan;
  at::Tensor edges;    // local: interior, then boundary
  at::Tensor weights;  // in their order
  std::int64_t num_interior;
  Adjacency interior;
  Adjacency boundary;
};

Share share_of(const Sample& sample, const Partition& partition, const comm::Group& group) {
  const at::Tensor mine = graph_parallel::edges_of_part(sample.edge_index, partition, group.rank());
  const HaloPlan plan(partition, sample.edge_index.index_select(1, mine), group);
  const at::Tensor order = at::cat({plan.interior(), plan.boundary()});
  const at::Tensor edges = plan.local_edges().index_select(1, order).contiguous();
  const std::int64_t num_interior = plan.interior().size(0);
  at::Tensor outside = edges.slice(1, num_interior).clone();
  outside[0].sub_(plan.num_owned());
  return {plan,
          edges,
          sample.weights.index_select(0, mine.index_select(0, order)),
          num_interior,
          Adjacency(edges.slice(1, 0, num_interior), plan.num_owned(), plan.num_owned()),
          Adjacency(outside, plan.num_halo(), plan.num_owned())};
}

at::Tensor select_multiply_add(const at::Tensor& rows, const at::Tensor& edges,
                               const at::Tensor& weights, std::int64_t num_targets) {
  return at::zeros({num_targets, rows.size(1)})
      .index_add(0, edges[1], rows.index_select(0, edges[0]) * weights);
}

at::Tensor interior_sum(const at::Tensor& x, const Share& share) {
  return graph_parallel::neighbour_sum(x, share.interior,
                                       share.weights.slice(0, 0, share.num_interior));
}

at::Tensor boundary_sum(const at::Tensor& halo, const Share& share) {
  return graph_parallel::neighbour_sum(halo, share.boundary,
                                       share.weights.slice(0, share.num_interior));
}

at::Tensor halo_layer(const at::Tensor& x, const Share& share, bool in_phases) {
  if (!in_phases) {
    const at::Tensor halo = graph_parallel::halo_exchange(x, share.plan);
    return interior_sum(x, share) + boundary_sum(halo, share);
  }
  graph_parallel::PendingRows pending = graph_parallel::halo_exchange_async(x, share.plan);
  const at::Tensor inside = interior_sum(x, share);
  return inside + boundary_sum(pending.finish(), share);
}

at::Tensor select_layer(const at::Tensor& x, const Share& share) {
  return select_multiply_add(graph_parallel::halo_extend(x, share.plan), share.edges, share.weights,
                             share.plan.num_owned());
}

// The reference's gather: tell the extents, pad to the largest, gather lists, trim and join.
at::Tensor padded_gather(const at::Tensor& x, const comm::Group& group) {
  const at::Tensor extents = comm::all_gather(at::full({1}, x.size(0), at::kLong), group);
  const auto largest = extents.max().item<std::int64_t>();
  at::Tensor padded = x.detach();
  if (largest > x.size(0)) padded = at::cat({padded, at::empty({largest - x.size(0), x.size(1)})});
  std::vector<std::vector<at::Tensor>> outputs(1);
  for (int r = 0; r < group.size(); ++r) outputs[0].push_back(at::empty_like(padded));
  std::vector<at::Tensor> inputs{padded};
  group.process_group()->getBackend(c10::DeviceType::CPU)->allgather(outputs, inputs)->wait();
  for (int r = 0; r < group.size(); ++r) {
    outputs[0][r] = outputs[0][r].narrow(0, 0, extents[r].item<std::int64_t>());
  }
  return at::cat(outputs[0]);
}

struct PaddedGather : torch::autograd::Function<PaddedGather> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const comm::Group* group, std::int64_t first, bool sums) {
    context->saved_data["group"] = reinterpret_cast<std::int64_t>(group);
    context->saved_data["first"] = first;
    context->saved_data["count"] = x.size(0);
    context->saved_data["sums"] = sums;
    return padded_gather(x, *group);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto* group = reinterpret_cast<const comm::Group*>(context->saved_data["group"].toInt());
    at::Tensor grad = grads[0];
    if (context->saved_data["sums"].toBool()) grad = comm::all_reduce(grad, *group);
    grad =
        grad.narrow(0, context->saved_data["first"].toInt(), context->saved_data["count"].toInt());
    return {grad.contiguous(), {}, {}, {}};
  }
};

class LayerBench {
 public:
  LayerBench(RankBench& bench, const Settings& settings)
      : bench_(bench),
        settings_(settings),
        groups_(bench),
        shm_(groups_.of(comm::Engine::kShm, "shm")),
        gloo_(groups_.plain_gloo("gloo")),
        sample_(settings.num_nodes, 1) {}

  void run() {
    const auto partition = Partition::recursive_bisection(sample_.positions, bench_.size(),
                                                          {.cell = sample_.box.cell});
    const Share share = share_of(sample_, partition, shm_);
    const Share gloo_share = share_of(sample_, partition, gloo_);
    check(partition, share);
    time_exchanges(share);
    time_alone();
    time_layers(share, gloo_share);
    time_overlap(partition);
    bench_.meet();
  }

 private:
  at::Tensor input(std::int64_t num_rows) const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    return at::randn({num_rows, settings_.num_columns}, generator, at::TensorOptions(at::kFloat))
        .requires_grad_(true);
  }

  // A layer forward and backward, with a gradient that is ready.
  std::function<void()> pass(const at::Tensor& x,
                             std::function<at::Tensor(const at::Tensor&)> layer) {
    return [x, layer = std::move(layer)] {
      const at::Tensor y = layer(x);
      const at::Tensor grad = torch::autograd::grad({y}, {x}, {y.detach()})[0];
      if (!grad.defined()) throw std::runtime_error("layer_bench: no gradient");
    };
  }

  std::string shape() const {
    return "n" + std::to_string(settings_.num_nodes) + "_c" +
           std::to_string(settings_.num_columns) + "_p" + std::to_string(bench_.size());
  }

  double time(const std::string& name, const std::function<void()>& call, std::int64_t bytes) {
    call();
    const Samples samples = bench_.measure(call, 1, settings_.seconds);
    std::vector<double> all = samples.near;
    all.insert(all.end(), samples.far.begin(), samples.far.end());
    if (bench_.rank() != 0) return 0;
    RowLabel label;
    label.name = "graph/" + name + "/" + shape();
    label.ranks = bench_.size();
    label.isa = kernels::name_of(kernels::active_isa());
    label.bytes = static_cast<std::size_t>(bytes);
    label.others = samples.others;
    print_row(label, all);
    std::sort(all.begin(), all.end());
    return quantile_of(all, 0.5);
  }

  // A wrong layer has no speed: the split one equals the whole one.
  void check(const Partition& partition, const Share& share) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(6);
    const at::Tensor all =
        at::randn({settings_.num_nodes, 4}, generator, at::TensorOptions(at::kFloat));
    const at::Tensor nodes = partition.nodes_of(bench_.rank());
    const at::Tensor whole =
        select_multiply_add(all, sample_.edge_index, sample_.weights, settings_.num_nodes);
    const at::Tensor mine = halo_layer(all.index_select(0, nodes), share, true).detach();
    if (!at::allclose(mine, whole.index_select(0, nodes), 1e-3, 1e-3)) {
      throw std::runtime_error("layer_bench: the split layer has other values");
    }
  }

  void time_exchanges(const Share& share) {
    const at::Tensor x = input(share.plan.num_owned()).detach();
    const std::int64_t row = settings_.num_columns * 4;
    const at::NoGradGuard guard;
    time(
        "exchange/halo", [&] { graph_parallel::halo_exchange(x, share.plan); },
        share.plan.num_sent() * row);
    time("exchange/gather", [&] { padded_gather(x, gloo_); }, share.plan.num_owned() * row);
  }

  void time_layers(const Share& share, const Share& gloo_share) {
    const at::Tensor x = input(share.plan.num_owned());
    const std::int64_t bytes = share.plan.num_sent() * settings_.num_columns * 4;
    const std::int64_t whole_bytes = share.plan.num_owned() * settings_.num_columns * 4;
    time("layer/halo", pass(x, [&](const at::Tensor& h) { return halo_layer(h, share, true); }),
         bytes);
    time("layer/halo_gloo",
         pass(x, [&](const at::Tensor& h) { return halo_layer(h, gloo_share, true); }), bytes);
    time("layer/halo_select", pass(x, [&](const at::Tensor& h) { return select_layer(h, share); }),
         bytes);
    // In the order of the gathered rows: the parts behind each other.
    const Partition& partition = share.plan.partition();
    const at::Tensor mine =
        graph_parallel::edges_of_part(sample_.edge_index, partition, bench_.rank());
    const at::Tensor global = sample_.edge_index.index_select(1, mine);
    const std::int64_t first = partition.offsets()[bench_.rank()];
    const at::Tensor places = partition.inverse().index_select(0, global.flatten()).view({2, -1});
    const at::Tensor edges = at::stack({places[0], places[1] - first});
    const at::Tensor weights = sample_.weights.index_select(0, mine);
    for (const bool sums : {false, true}) {
      time(sums ? "layer/gather_sum" : "layer/gather",
           pass(x,
                [&, sums](const at::Tensor& h) {
                  const at::Tensor all = PaddedGather::apply(h, &gloo_, first, sums);
                  return select_multiply_add(all, edges, weights, share.plan.num_owned());
                }),
           whole_bytes);
    }
  }

  // Rank 0 alone; the others wait.
  void time_alone() {
    const Sample half(settings_.num_nodes / bench_.size(), 2);
    const comm::Group single = groups_.alone();
    const auto order = Partition::recursive_bisection(half.positions, 1, {.cell = half.box.cell});
    const Share share = share_of(half, order, single);
    const at::Tensor x = input(share.plan.num_owned());
    const auto layer = pass(x, [&](const at::Tensor& h) { return halo_layer(h, share, true); });
    time(
        "layer/alone",
        [&] {
          if (bench_.rank() == 0) layer();
        },
        0);
    time("layer/alone_together", layer, 0);
  }

  // A link on which the exchange takes as long as the interior work.
  void time_overlap(const Partition& partition) {
    const Share plain = share_of(sample_, partition, shm_);
    const at::Tensor x = input(plain.plan.num_owned()).detach();
    const std::int64_t bytes = plain.plan.num_sent() * settings_.num_columns * 4;
    const at::NoGradGuard guard;
    double interior = time("overlap/interior", [&] { interior_sum(x, plain); }, 0);
    at::Tensor told = at::full({1}, interior, at::kDouble);
    comm::broadcast_(told, 0, shm_);
    interior = told.item<double>();
    const comm::Group slow =
        tessera::testing::wrapped_group(shm_, std::make_shared<tessera::testing::Traffic>(),
                                        static_cast<double>(bytes) / (interior * 1e-6));
    const Share share = share_of(sample_, partition, slow);
    const double exchange =
        time("overlap/exchange", [&] { graph_parallel::halo_exchange(x, share.plan); }, bytes);
    const double blocking = time("overlap/one_phase", [&] { halo_layer(x, share, false); }, bytes);
    const double phases = time("overlap/two_phases", [&] { halo_layer(x, share, true); }, bytes);
    const at::AutoGradMode with_grad(true);
    const at::Tensor leaf = input(plain.plan.num_owned());
    const double both_blocking =
        time("overlap/one_phase_and_back",
             pass(leaf, [&](const at::Tensor& h) { return halo_layer(h, share, false); }), bytes);
    const double both_phases =
        time("overlap/two_phases_and_back",
             pass(leaf, [&](const at::Tensor& h) { return halo_layer(h, share, true); }), bytes);
    if (bench_.rank() != 0) return;
    std::fprintf(stderr, "hidden: %.0f %% of the exchange forward, %.0f %% forward and backward\n",
                 100 * (blocking - phases) / exchange,
                 100 * (both_blocking - both_phases) / (2 * exchange));
  }

  RankBench& bench_;
  Settings settings_;
  RankGroups groups_;
  comm::Group shm_;
  comm::Group gloo_;
  Sample sample_;
};

Settings read_settings(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--nodes") settings.num_nodes = std::atoll(argv[i + 1]);
    if (flag == "--columns") settings.num_columns = std::atoll(argv[i + 1]);
    if (flag == "--seconds") settings.seconds = std::atof(argv[i + 1]);
  }
  return settings;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  const Settings settings = read_settings(argc, argv);
  return run_ranks(argc, argv, {2}, [&](RankBench& bench) {
    at::set_num_threads(1);
    LayerBench(bench, settings).run();
  });
}
