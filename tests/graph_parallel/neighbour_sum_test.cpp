#include "tessera/graph_parallel/neighbour_sum.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "graph_parallel/graphs.h"
#include "kernels/neighbour_sum.h"
#include "support/derivatives.h"
#include "support/error_text.h"
#include "support/ranks.h"

namespace tessera::graph_parallel {
namespace {

using comm::Group;
using tessera::testing::check_derivatives;
using tessera::testing::error_text;
using tessera::testing::Objective;
using tessera::testing::random_edges;
using tessera::testing::random_tensor;

at::Tensor plain(const at::Tensor& rows, const at::Tensor& edges, std::int64_t num_targets,
                 const at::Tensor& weights) {
  at::Tensor messages = rows.index_select(0, edges[0]);
  if (weights.defined()) messages = messages * weights;
  return at::zeros({num_targets, rows.size(1)}, rows.options()).index_add(0, edges[1], messages);
}

at::Tensor edges_between(std::int64_t num_sources, std::int64_t num_targets, std::int64_t count) {
  return at::stack(
      {random_edges(num_sources, count, 3)[0], random_edges(num_targets, count, 4)[0]});
}

TEST(NeighbourSum, EqualsSelectMultiplyAdd) {
  const at::Tensor edges = edges_between(17, 11, 90);
  const Adjacency adjacency(edges, 17, 11);
  for (const auto dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const double tolerance = dtype == at::kDouble ? 1e-13 : dtype == at::kFloat ? 1e-5 : 5e-2;
    for (const std::int64_t columns : {1, 3, 8, 33, 128}) {
      const at::Tensor rows = random_tensor({17, columns}, 5).to(dtype);
      for (const at::Tensor& weights : {at::Tensor(), random_tensor({90, 1}, 6).to(dtype),
                                        random_tensor({90, columns}, 7).to(dtype)}) {
        EXPECT_TRUE(at::allclose(neighbour_sum(rows, adjacency, weights),
                                 plain(rows, edges, 11, weights), tolerance, tolerance))
            << dtype << " " << columns;
      }
    }
  }
}

TEST(NeighbourSum, OfNothingIsZero) {
  const Adjacency none(at::zeros({2, 0}, at::kLong), 0, 4);
  EXPECT_TRUE(at::equal(neighbour_sum(at::zeros({0, 3}), none), at::zeros({4, 3})));
  const Adjacency nowhere(at::zeros({2, 0}, at::kLong), 4, 0);
  EXPECT_EQ(neighbour_sum(at::zeros({4, 3}), nowhere).size(0), 0);
}

TEST(NeighbourSum, DerivativesOfThreeOrders) {
  const at::Tensor edges = edges_between(5, 4, 12);
  const Adjacency adjacency(edges, 5, 4);
  tessera::testing::run_ranks(1, [&](const Group& group) {
    for (const std::int64_t width : {1, 2}) {
      // Rows and weights in one input, so that mixed derivatives are checked too.
      const Objective objective{[&](const at::Tensor& x) {
        const at::Tensor rows = x.narrow(0, 0, 10).view({5, 2}).sin();
        const at::Tensor weights = x.narrow(0, 10, 12 * width).view({12, width}).cos();
        const at::Tensor y = neighbour_sum(rows, adjacency, weights);
        return (random_tensor(y.sizes(), 8) * y.sin() * y).sum();
      }};
      check_derivatives(objective, random_tensor({10 + 12 * width}, 9), group, false);
    }
  });
}

TEST(NeighbourSum, EveryInstructionSetEqualsThePlainLoops) {
  const at::Tensor edges = edges_between(40, 30, 300);
  const at::Tensor order = edges[1].argsort(true, 0, false);
  const at::Tensor column = edges[0].index_select(0, order).contiguous();
  at::Tensor first = at::zeros({31}, at::kLong);
  first.slice(0, 1).copy_(at::bincount(edges[1], {}, 30).cumsum(0));
  const kernels::EdgeRows view{first.const_data_ptr<std::int64_t>(),
                               column.const_data_ptr<std::int64_t>(),
                               order.const_data_ptr<std::int64_t>()};
  for (const auto isa : kernels::supported_isas()) {
    const auto& fast = *kernels::neighbour_sum_kernels<float>(isa);
    const auto& slow = kernels::neighbour_sum_reference<float>();
    for (const std::int64_t columns : {1, 7, 16, 65, 128}) {
      const at::Tensor rows = random_tensor({40, columns}, 1).to(at::kFloat);
      const at::Tensor others = random_tensor({30, columns}, 2).to(at::kFloat);
      for (const std::int64_t width : {std::int64_t{1}, columns}) {
        const at::Tensor weights = random_tensor({300, width}, 3).to(at::kFloat);
        at::Tensor sums[2] = {at::zeros({30, columns}), at::zeros({30, columns})};
        at::Tensor products[2] = {at::zeros({300, width}), at::zeros({300, width})};
        for (const int which : {0, 1}) {
          const auto& table = which == 0 ? fast : slow;
          table.neighbour_sum(view, 0, 30, rows.const_data_ptr<float>(), columns,
                              weights.const_data_ptr<float>(), width,
                              sums[which].data_ptr<float>());
          table.edge_product(view, 0, 30, rows.const_data_ptr<float>(),
                             others.const_data_ptr<float>(), columns, width,
                             products[which].data_ptr<float>());
        }
        EXPECT_TRUE(at::allclose(sums[0], sums[1], 1e-4, 1e-4)) << kernels::name_of(isa);
        EXPECT_TRUE(at::allclose(products[0], products[1], 1e-4, 1e-4)) << kernels::name_of(isa);
      }
    }
  }
}

TEST(NeighbourSum, WrongShapesAreNamed) {
  EXPECT_EQ(error_text([] { Adjacency(at::tensor({0, 5}, at::kLong).view({2, 1}), 3, 5); }),
            "graph.adjacency: there is no target row 5 among 5.");
  EXPECT_EQ(error_text([] { Adjacency(at::ones({2, 2}), 3, 5); }),
            "graph.adjacency: the edges must be a tensor of int64, [2, edges]: sources, then "
            "targets.");
  const Adjacency adjacency(at::zeros({2, 2}, at::kLong), 3, 5);
  EXPECT_EQ(error_text([&] { neighbour_sum(at::ones({4, 2}), adjacency); }),
            "graph.neighbour_sum: the rows have shape [4, 2], the edges have 3 source rows.");
  EXPECT_EQ(error_text([&] { neighbour_sum(at::ones({3, 2}), adjacency, at::ones({2, 3})); }),
            "graph.neighbour_sum: the weights have shape [2, 3] for 2 edges and 2 columns.");
  EXPECT_EQ(error_text(
                [&] { neighbour_sum(at::ones({3, 2}), adjacency, at::ones({2, 1}, at::kDouble)); }),
            "graph.neighbour_sum: the rows are Float, the weights are Double.");
}

}  // namespace
}  // namespace tessera::graph_parallel
