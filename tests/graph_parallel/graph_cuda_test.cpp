// Regions and halos on CUDA tensors; two ranks are two processes that share the GPU, over Gloo.
//
// Values and derivatives of the second order are compared with one process on the CPU, in double.

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "graph_parallel/graphs.h"
#include "support/derivatives.h"
#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/graph_parallel/halo.h"
#include "tessera/graph_parallel/neighbour_sum.h"
#include "tessera/regions/regions.h"

namespace tessera::graph_parallel {
namespace {

using comm::Group;
using tessera::testing::periodic_cloud;
using tessera::testing::random_tensor;

class GraphCuda : public ::testing::TestWithParam<int> {
 protected:
  int size() const { return GetParam(); }
  void on_all_ranks(const std::function<void(const Group&)>& body) {
    processes_.run(size(), body, tessera::testing::test_options(comm::Engine::kGloo));
  }

 private:
  tessera::testing::RankProcesses processes_;
};

INSTANTIATE_TEST_SUITE_P(Worlds, GraphCuda, ::testing::Values(1, 2, 3));

at::Tensor on_gpu(const at::Tensor& tensor) { return tensor.to(at::kCUDA); }

void expect_equal(const at::Tensor& expected, const at::Tensor& actual, const char* what) {
  ASSERT_EQ(expected.sizes(), actual.sizes()) << what;
  EXPECT_TRUE(actual.is_cuda()) << what;
  EXPECT_TRUE(at::allclose(expected, actual.cpu(), 1e-11, 1e-11))
      << what << ": " << (expected - actual.cpu()).abs().max().item<double>();
}

/// First derivative, and the derivative of its squared norm: what training on forces needs.
std::pair<at::Tensor, at::Tensor> derivatives(
    const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& energy,
    const std::function<at::Tensor(const at::Tensor&)>& total) {
  const at::Tensor force = torch::autograd::grad({energy(x)}, {x}, {}, std::nullopt, true)[0];
  const at::Tensor second = torch::autograd::grad({total(force.pow(2).sum())}, {x})[0];
  return {force.detach(), second};
}

TEST_P(GraphCuda, TwoLayersEqualOneProcessToTheSecondOrder) {
  const auto cloud = periodic_cloud(40, {4, 4, 4}, 1.5, 3);
  const std::int64_t num_edges = cloud.edge_index.size(1);
  const at::Tensor weights = random_tensor({num_edges, 1}, 4);
  const at::Tensor features = random_tensor({40, 3}, 5);
  const auto layer = [](const at::Tensor& rows, const at::Tensor& edges, const at::Tensor& w,
                        std::int64_t targets) {
    return at::zeros({targets, rows.size(1)}, rows.options().requires_grad(false))
        .index_add(0, edges[1], rows.index_select(0, edges[0]) * w)
        .tanh();
  };
  const auto alone = [&](const at::Tensor& x) {
    const at::Tensor h = layer(x.sin(), cloud.edge_index, weights, 40);
    return layer(h, cloud.edge_index, weights, 40).pow(2).sum();
  };
  const at::Tensor x = features.clone().requires_grad_(true);
  const auto [force, second] = derivatives(x, alone, [](const at::Tensor& t) { return t; });
  for (const bool in_phases : {false, true}) {
    for (const bool deterministic : {false, true}) {
      on_all_ranks([&, force = force, second = second](const Group& group) {
        const auto partition =
            Partition::recursive_bisection(cloud.positions, group.size(), {.cell = cloud.cell});
        const at::Tensor mine = edges_of_part(cloud.edge_index, partition, group.rank());
        HaloOptions options;
        options.is_symmetric = true;
        options.deterministic = deterministic;
        const HaloPlan plan(partition, cloud.edge_index.index_select(1, mine), group, options);
        const at::Tensor nodes = partition.nodes_of(group.rank());
        const at::Tensor edges = on_gpu(plan.local_edges());
        const at::Tensor w = on_gpu(weights.index_select(0, mine));
        const auto extended = [&](const at::Tensor& h) {
          if (!in_phases) return halo_extend(h, plan);
          PendingRows pending = halo_exchange_async(h, plan);
          return at::cat({h, pending.finish()});
        };
        const auto energy = [&](const at::Tensor& own) {
          const at::Tensor h = layer(extended(own.sin()), edges, w, plan.num_owned());
          return regions::reduce(layer(extended(h), edges, w, plan.num_owned()).pow(2).sum(),
                                 group);
        };
        const at::Tensor own = on_gpu(features.index_select(0, nodes)).requires_grad_(true);
        const auto [own_force, own_second] = derivatives(
            own, energy, [&](const at::Tensor& t) { return regions::reduce(t, group); });
        expect_equal(force.index_select(0, nodes), own_force, "forces");
        expect_equal(second.index_select(0, nodes), own_second, "second derivative");
      });
    }
  }
}

TEST_P(GraphCuda, RegionsAlongEveryDimension) {
  on_all_ranks([&](const Group& group) {
    const regions::Sizes sizes = group.size() == 1   ? regions::Sizes{3}
                                 : group.size() == 2 ? regions::Sizes{1, 3}
                                                     : regions::Sizes{3, 1, 0};
    std::int64_t total = 0;
    std::int64_t first = 0;
    for (int r = 0; r < group.size(); ++r) {
      if (r < group.rank()) first += sizes[r];
      total += sizes[r];
    }
    for (const std::int64_t dim : {0, 1, -1}) {
      const at::Tensor whole = random_tensor({total, total, total}, 7);
      const at::Tensor own = whole.narrow(dim, first, sizes[group.rank()]).contiguous();
      const at::Tensor leaf = on_gpu(own).requires_grad_(true);
      const at::Tensor gathered = regions::gather(leaf, group, dim, sizes);
      expect_equal(whole, gathered.detach(), "gather");
      // Every rank does the same with the whole.
      const at::Tensor slope = torch::autograd::grad({gathered.pow(3).sum()}, {leaf}, {},
                                                     std::nullopt, /*create_graph=*/true)[0];
      expect_equal(3 * own.pow(2), slope.detach(), "gradient of gather");
      const at::Tensor bend = torch::autograd::grad({slope.pow(2).sum()}, {leaf})[0];
      expect_equal(36 * own.pow(3), bend, "second derivative of gather");
      // Every rank does something else with it.
      const at::Tensor shared = regions::gather_shared(leaf, group, dim, sizes);
      const at::Tensor sum =
          torch::autograd::grad({(shared * (group.rank() + 1.0)).sum()}, {leaf})[0];
      expect_equal(at::full_like(own, group.size() * (group.size() + 1) / 2.0), sum,
                   "gradient of gather_shared");
      expect_equal(own, regions::scatter(on_gpu(whole), group, dim, sizes), "scatter");
      expect_equal(own * group.size(), regions::reduce_scatter(on_gpu(whole), group, dim, sizes),
                   "reduce_scatter");
    }
    const at::Tensor x = on_gpu(at::full({2}, group.rank() + 1.0, at::kDouble));
    const double all = group.size() * (group.size() + 1) / 2.0;
    expect_equal(at::full({2}, all, at::kDouble), regions::reduce(x, group), "reduce");
    expect_equal(at::full({2}, all, at::kDouble), regions::all_reduce(x, group), "all_reduce");
    EXPECT_EQ(x[0].item<double>(), group.rank() + 1.0);
  });
}

// Rows of 16-byte parts and others, wider than a warp too; hubs and rows without edges.
TEST(NeighbourSumOnGpu, ValuesAndBothGradientsAreThoseOfTheCpu) {
  constexpr std::int64_t kSources = 50;
  constexpr std::int64_t kTargets = 40;
  constexpr std::int64_t kEdges = 700;
  const at::Tensor sources = at::randint(kSources, {kEdges}, at::kLong);
  // Half of the edges end at row 3; none at the last ones.
  const at::Tensor targets = at::where(at::rand({kEdges}) < 0.5, at::full({kEdges}, 3, at::kLong),
                                       at::randint(kTargets - 5, {kEdges}, at::kLong));
  const Adjacency adjacency(at::stack({sources, targets}), kSources, kTargets);
  for (const std::int64_t columns : {1, 2, 3, 4, 37, 64, 128, 260}) {
    for (const std::int64_t width : {std::int64_t{0}, std::int64_t{1}, columns}) {
      for (const auto type : {at::kDouble, at::kFloat}) {
        const at::Tensor rows = at::randn({kSources, columns}, type);
        const at::Tensor weights = width == 0 ? at::Tensor() : at::randn({kEdges, width}, type);
        const at::Tensor cotangent = at::randn({kTargets, columns}, type);
        const auto run = [&](at::Device device) {
          std::vector<at::Tensor> inputs{rows.to(device, type, false, /*copy=*/true)};
          if (weights.defined()) inputs.push_back(weights.to(device, type, false, /*copy=*/true));
          for (at::Tensor& input : inputs) input.requires_grad_(true);
          const at::Tensor sum =
              neighbour_sum(inputs[0], adjacency, inputs.size() > 1 ? inputs[1] : at::Tensor());
          std::vector<at::Tensor> found{sum.detach().cpu()};
          for (const at::Tensor& grad :
               torch::autograd::grad({sum}, inputs, {cotangent.to(device)})) {
            found.push_back(grad.cpu());
          }
          return found;
        };
        const auto expected = run(at::kCPU);
        const auto actual = run(at::kCUDA);
        const double limit = type == at::kDouble ? 1e-11 : 1e-4;  // sums of up to 400 numbers
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(at::allclose(expected[i], actual[i], limit, limit))
              << columns << " columns, weights " << width << ", result " << i << ": "
              << (expected[i] - actual[i]).abs().max().item<double>();
        }
        EXPECT_TRUE(at::equal(actual[0], run(at::kCUDA)[0]));
      }
    }
  }
  EXPECT_THROW(neighbour_sum(at::ones({kSources, 2}).cuda(), adjacency, at::ones({kEdges, 1})),
               c10::ValueError);
}

TEST_P(GraphCuda, NeighbourSumAndReducedPayload) {
  const auto cloud = periodic_cloud(30, {4, 4, 4}, 1.5, 3);
  const at::Tensor rows = random_tensor({30, 4}, 8);
  const at::Tensor weights = random_tensor({cloud.edge_index.size(1), 1}, 9);
  on_all_ranks([&](const Group& group) {
    const Adjacency adjacency(cloud.edge_index, 30, 30);
    expect_equal(neighbour_sum(rows, adjacency, weights),
                 neighbour_sum(on_gpu(rows), adjacency, on_gpu(weights)), "neighbour sum");
    const auto partition = Partition::contiguous(30, group.size());
    const at::Tensor mine = edges_of_part(cloud.edge_index, partition, group.rank());
    HaloOptions options;
    options.payload = at::kBFloat16;
    const HaloPlan plan(partition, cloud.edge_index.index_select(1, mine), group, options);
    const at::Tensor owned = rows.index_select(0, partition.nodes_of(group.rank()));
    const at::Tensor halo = halo_exchange(on_gpu(owned), plan);
    expect_equal(rows.index_select(0, plan.halo_nodes()).to(at::kBFloat16).to(at::kDouble),
                 halo.detach(), "halo in bfloat16");
  });
}

}  // namespace
}  // namespace tessera::graph_parallel
