#include "tessera/graph_parallel/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <thread>

#include <ATen/ATen.h>

#include "graph_parallel/graphs.h"
#include "support/error_text.h"

namespace tessera::graph_parallel {
namespace {

using tessera::testing::Cloud;
using tessera::testing::error_text;
using tessera::testing::periodic_cloud;

using Make = Partition (*)(const at::Tensor&, int, const SpatialOptions&);
const std::vector<std::pair<const char*, Make>> kSpatial = {
    {"morton", &Partition::morton},
    {"hilbert", &Partition::hilbert},
    {"recursive_bisection", &Partition::recursive_bisection}};

// Rows that each part receives, without making plans.
std::vector<std::int64_t> halos_of(const Partition& partition, const at::Tensor& edge_index) {
  const at::Tensor from = partition.owner_of(edge_index[0]).contiguous();
  const at::Tensor to = partition.owner_of(edge_index[1]).contiguous();
  std::vector<std::set<std::int64_t>> rows(partition.num_parts());
  const auto* source = edge_index.const_data_ptr<std::int64_t>();
  for (std::int64_t edge = 0; edge < edge_index.size(1); ++edge) {
    const auto owner = to.const_data_ptr<std::int64_t>()[edge];
    if (from.const_data_ptr<std::int64_t>()[edge] != owner) rows[owner].insert(source[edge]);
  }
  std::vector<std::int64_t> sizes;
  for (const auto& part : rows) sizes.push_back(static_cast<std::int64_t>(part.size()));
  return sizes;
}

double mean_of(const std::vector<std::int64_t>& numbers) {
  double sum = 0;
  for (const auto number : numbers) sum += static_cast<double>(number);
  return sum / static_cast<double>(numbers.size());
}

// Everything a partition promises whatever made it.
void expect_consistent(const Partition& partition) {
  const std::int64_t num = partition.num_nodes();
  const at::Tensor order = partition.permutation();
  EXPECT_TRUE(at::equal(std::get<0>(order.sort()), at::arange(num)));
  EXPECT_TRUE(at::equal(order.index_select(0, partition.inverse()), at::arange(num)));
  const at::Tensor owners = partition.owners();
  for (int part = 0; part < partition.num_parts(); ++part) {
    const at::Tensor nodes = partition.nodes_of(part);
    EXPECT_EQ(nodes.size(0), partition.sizes()[part]);
    EXPECT_EQ(partition.offsets()[part + 1] - partition.offsets()[part], partition.sizes()[part]);
    EXPECT_TRUE((owners.index_select(0, nodes) == part).all().item<bool>());
    EXPECT_TRUE(at::equal(nodes, order.narrow(0, partition.offsets()[part], nodes.size(0))));
  }
  EXPECT_TRUE(at::equal(partition.owner_of(at::arange(num)), owners));
  EXPECT_EQ(partition.offsets().back(), num);
}

TEST(Partition, ContiguousPartsAreEven) {
  for (const int parts : {1, 2, 3, 4, 7}) {
    for (const std::int64_t nodes : {0, 1, 2, 3, 4, 5, 10, 13}) {
      const auto partition = Partition::contiguous(nodes, parts);
      expect_consistent(partition);
      EXPECT_TRUE(partition.is_contiguous());
    }
  }
  EXPECT_EQ(Partition::contiguous(10, 4).sizes(), (std::vector<std::int64_t>{3, 3, 2, 2}));
  EXPECT_EQ(Partition::contiguous({2, 0, 5}).describe(), "7 nodes in 3 parts of 0 to 5");
}

TEST(Partition, AnOwnerTableIsKept) {
  const at::Tensor owners = at::tensor({2, 0, 2, 1, 0, 2}, at::kLong);
  const auto partition = Partition::from_owners(owners, 4);
  expect_consistent(partition);
  EXPECT_TRUE(at::equal(partition.owners(), owners));
  EXPECT_TRUE(at::equal(partition.nodes_of(2), at::tensor({0, 2, 5}, at::kLong)));
  EXPECT_EQ(partition.sizes(), (std::vector<std::int64_t>{2, 1, 3, 0}));
}

TEST(Partition, SpatialPartsAreEvenAndRepeatable) {
  for (const auto& [name, make] : kSpatial) {
    for (const int parts : {1, 2, 3, 5, 8, 16}) {
      const Cloud cloud = periodic_cloud(101, {4, 4, 4}, 0.1, 3);
      const auto partition = make(cloud.positions, parts, {.cell = cloud.cell});
      expect_consistent(partition);
      const auto [low, high] =
          std::minmax_element(partition.sizes().begin(), partition.sizes().end());
      EXPECT_LE(*high - *low, 1) << name;
      EXPECT_EQ(make(cloud.positions, parts, {.cell = cloud.cell}).digest(), partition.digest());
    }
    EXPECT_EQ(make(at::zeros({0, 3}), 3, {}).num_nodes(), 0) << name;
    EXPECT_EQ(make(at::zeros({5, 3}), 2, {}).sizes(), (std::vector<std::int64_t>{3, 2})) << name;
  }
}

TEST(Partition, RenumberingTheNodesRenumbersTheAnswer) {
  const Cloud cloud = periodic_cloud(200, {3, 5, 2}, 0.1, 4);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor order = at::randperm(200, generator, at::TensorOptions(at::kLong));
  for (const auto& [name, make] : kSpatial) {
    const auto first = make(cloud.positions, 6, {.cell = cloud.cell});
    const auto second = make(cloud.positions.index_select(0, order), 6, {.cell = cloud.cell});
    EXPECT_TRUE(at::equal(first.owners().index_select(0, order), second.owners())) << name;
  }
}

// Four clusters, one of them across the border of the cell.
TEST(Partition, SeparateClustersStayTogether) {
  const at::Tensor centres =
      at::tensor({0.0, 5.0, 5.0, 2.5, 5.0, 5.0, 5.0, 5.0, 5.0, 7.5, 5.0, 5.0}, at::kDouble)
          .view({4, 3});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
  const at::Tensor spread = at::rand({80, 3}, generator, at::TensorOptions(at::kDouble)) - 0.5;
  const at::Tensor positions = centres.repeat_interleave(20, 0) + spread * 0.6;
  const at::Tensor cell = at::eye(3, at::kDouble) * 10;
  const auto partition = Partition::recursive_bisection(positions, 4, {.cell = cell});
  for (int cluster = 0; cluster < 4; ++cluster) {
    const at::Tensor owners = partition.owners().narrow(0, 20 * cluster, 20);
    EXPECT_TRUE((owners == owners[0]).all().item<bool>()) << cluster;
  }
}

TEST(Partition, ALongCellIsCutAcrossItsLongAxis) {
  const Cloud cloud = periodic_cloud(400, {2, 20, 2}, 0.1, 6);
  const auto partition = Partition::recursive_bisection(cloud.positions, 4, {.cell = cloud.cell});
  for (int part = 0; part < 4; ++part) {
    const at::Tensor along = cloud.positions.index_select(0, partition.nodes_of(part)).select(1, 1);
    const double angle_step = 2 * M_PI / 20;
    const at::Tensor mean =
        at::stack({(along * angle_step).cos(), (along * angle_step).sin()}).mean(1);
    EXPECT_GT(mean.norm().item<double>(), 0.8);  // a quarter of a circle: 0.90
  }
}

TEST(Partition, WeightsAreShared) {
  const Cloud cloud = periodic_cloud(600, {6, 6, 6}, 0.1, 8);
  // Ten times the work in one half of the box.
  const at::Tensor weights = at::where(cloud.positions.select(1, 0) < 3, 10.0, 1.0);
  for (const auto& [name, make] : kSpatial) {
    const auto partition = make(cloud.positions, 5, {.cell = cloud.cell, .weights = weights});
    expect_consistent(partition);
    const double ideal = weights.sum().item<double>() / 5;
    for (int part = 0; part < 5; ++part) {
      const double mine = weights.index_select(0, partition.nodes_of(part)).sum().item<double>();
      EXPECT_NEAR(mine, ideal, 0.03 * ideal) << name;
      EXPECT_GT(partition.sizes()[part], 0) << name;
    }
  }
  // One node with all the weight: nobody goes without.
  at::Tensor lopsided = at::zeros({8}, at::kDouble);
  lopsided[0] = 1;
  for (const auto& [name, make] : kSpatial) {
    const auto partition = make(cloud.positions.narrow(0, 0, 8), 4, {.weights = lopsided});
    EXPECT_EQ(*std::min_element(partition.sizes().begin(), partition.sizes().end()) > 0, true)
        << name;
  }
}

/// How many nodes outside a box of the given sides have a neighbour inside, on average, for nodes
/// that lie at random, one per unit of volume. A side of 0 means that the box spans the cell there.
///
/// A node outside is in the halo unless the part of its ball inside the box is empty, which has
/// probability exp(-volume). Both integrals are sums over a grid.
double expected_halo(const std::vector<double>& sides, double radius, double spanned) {
  const double step = radius / 12;
  // Volume of the ball around a point, as far as it lies in the box.
  const auto volume_inside = [&](double x, double y, double z) {
    double volume = 0;
    for (double dx = -radius + step / 2; dx < radius; dx += step) {
      for (double dy = -radius + step / 2; dy < radius; dy += step) {
        const double square = radius * radius - dx * dx - dy * dy;
        if (square <= 0 || x + dx < 0 || x + dx > sides[0] || y + dy < 0 || y + dy > sides[1]) {
          continue;
        }
        const double half = std::sqrt(square);
        const double low = sides[2] == 0 ? -half : std::max(-half, -z);
        const double high = sides[2] == 0 ? half : std::min(half, sides[2] - z);
        if (high > low) volume += (high - low) * step * step;
      }
    }
    return volume;
  };
  // One eighth of the surroundings: the box is the same from every side.
  const double outer = radius / 6;
  double expected = 0;
  const auto reach = [&](double side) { return side / 2 + radius; };
  for (double x = outer / 2; x < reach(sides[0]); x += outer) {
    for (double y = outer / 2; y < reach(sides[1]); y += outer) {
      for (double z = outer / 2; z < (sides[2] == 0 ? outer : reach(sides[2])); z += outer) {
        const double at_x = sides[0] / 2 + x;
        const double at_y = sides[1] / 2 + y;
        const double at_z = sides[2] / 2 + z;
        const bool is_inside =
            at_x < sides[0] && at_y < sides[1] && (sides[2] == 0 || at_z < sides[2]);
        if (is_inside) continue;
        const double share = 1 - std::exp(-volume_inside(at_x, at_y, at_z));
        expected += share * outer * outer * (sides[2] == 0 ? spanned / 2 : outer);
      }
    }
  }
  return 8 * expected;
}

// About 40 neighbours per node; one part of sixteen would get 3840 rows by an all-gather.
TEST(Partition, BisectionHasTheSmallestHalo) {
  const double radius = std::cbrt(40 / (4.0 / 3.0 * M_PI));
  struct Case {
    std::vector<double> lengths;
    int parts;
    std::vector<double> sides;  // of the best parts
    double mean_limit;          // 0: from the expectation
    std::int64_t largest_limit;
  };
  for (const Case& sample :
       {Case{{16, 16, 16}, 16, {8, 8, 4}, 600, 660}, Case{{16, 16, 16}, 8, {8, 8, 8}, 0, 0},
        Case{{25.4, 25.4, 6.35}, 16, {6.35, 6.35, 0}, 0, 0}}) {
    const Cloud cloud = periodic_cloud(4096, sample.lengths, radius, 1);
    const auto halos = [&](Make make) {
      return halos_of(make(cloud.positions, sample.parts, {.cell = cloud.cell}), cloud.edge_index);
    };
    const auto bisection = halos(&Partition::recursive_bisection);
    const auto largest = *std::max_element(bisection.begin(), bisection.end());
    // Planes through random points cut no perfect boxes: 5 % more than those would have. A count
    // of random nodes scatters by its square root; of sixteen, none is three of these away.
    const double ideal = expected_halo(sample.sides, radius, sample.lengths[2]);
    const double mean_limit = sample.mean_limit > 0 ? sample.mean_limit : 1.05 * ideal;
    const double largest_limit = sample.largest_limit > 0
                                     ? static_cast<double>(sample.largest_limit)
                                     : 1.05 * ideal + 3 * std::sqrt(ideal);
    std::printf(
        "%d parts: bisection %.0f (largest %ld; boxes %.0f, limits %.0f and %.0f), morton "
        "%.0f, hilbert %.0f\n",
        sample.parts, mean_of(bisection), static_cast<long>(largest), ideal, mean_limit,
        largest_limit, mean_of(halos(&Partition::morton)), mean_of(halos(&Partition::hilbert)));
    EXPECT_LE(mean_of(bisection), mean_limit);
    EXPECT_LE(static_cast<double>(largest), largest_limit);
    EXPECT_LE(mean_of(bisection), mean_of(halos(&Partition::morton)));
    EXPECT_LE(mean_of(bisection), mean_of(halos(&Partition::hilbert)));
  }
}

TEST(Partition, NeighboursOnTheHilbertCurveAreNeighboursInSpace) {
  const at::Tensor line = at::arange(8, at::kDouble);
  const at::Tensor grid = at::stack(at::meshgrid({line, line, line}, "ij"), -1).view({-1, 3});
  const at::Tensor walk = grid.index_select(0, Partition::hilbert(grid, 1).permutation());
  const at::Tensor steps = (walk.slice(0, 1) - walk.slice(0, 0, -1)).abs().sum(1);
  // The grid points are not the corners of the curve's own grid, so a few steps are longer.
  EXPECT_LT(steps.mean().item<double>(), 1.6);
  EXPECT_LE(steps.max().item<double>(), 4);
}

TEST(Partition, WrongInputIsNamed) {
  EXPECT_EQ(error_text([] { Partition::from_owners(at::tensor({0, 4, 1}, at::kLong), 4); }),
            "graph.partition: node 1 is owned by 4, but there are 4 parts (0 to 3).");
  EXPECT_EQ(error_text([] { Partition::from_owners(at::ones({3}), 4); }),
            "graph.partition: the owners must be one whole number per node.");
  EXPECT_EQ(error_text([] { Partition::contiguous(5, 0); }),
            "graph.partition: 0 parts were asked for. Ask for at least one.");
  EXPECT_EQ(error_text([] { Partition::contiguous(-1, 2); }),
            "graph.partition: a graph cannot have -1 nodes.");
  EXPECT_EQ(error_text([] { Partition::contiguous({1, -2}); }),
            "graph.partition: part 1 cannot have -2 nodes.");
  EXPECT_EQ(error_text([] { Partition::contiguous(4, 2).nodes_of(2); }),
            "graph.partition: there is no part 2 among 2.");
  EXPECT_EQ(error_text([] { Partition::contiguous(4, 2).owner_of(at::tensor({1, 9}, at::kLong)); }),
            "graph.partition: there is no node 9 in a graph of 4 nodes.");
  EXPECT_EQ(error_text([] { Partition::morton(at::ones({4, 2}), 2); }),
            "graph.morton: the positions have shape [4, 2]. Give one row of three coordinates per "
            "node.");
  EXPECT_EQ(error_text([] { Partition::hilbert(at::full({1, 3}, NAN), 2); }),
            "graph.hilbert: a position is not finite.");
  EXPECT_EQ(error_text([] { Partition::morton(at::ones({4, 3}), 0); }),
            "graph.morton: 0 parts were asked for. Ask for at least one.");
  EXPECT_EQ(error_text([] { Partition::morton(at::ones({4, 3}), 2, {.cell = at::zeros({3, 3})}); }),
            "graph.morton: the cell has volume 0. Its lattice vectors must be independent.");
  EXPECT_EQ(error_text([] { Partition::morton(at::ones({4, 3}), 2, {.weights = at::ones({3})}); }),
            "graph.morton: the weights have shape [3] for 4 nodes.");
  EXPECT_EQ(
      error_text([] { Partition::morton(at::ones({1, 3}), 2, {.weights = at::full({1}, -1.0)}); }),
      "graph.morton: node 0 has weight -1. Weights are finite and not negative.");
}

TEST(Partition, MetisIsThereOrSaysSo) {
  const Cloud cloud = periodic_cloud(300, {6, 6, 6}, 1.2, 9);
  if (!Partition::has_metis()) {
    EXPECT_EQ(error_text([&] { Partition::metis(300, cloud.edge_index, 4); }),
              "graph.metis: this build has no METIS. Use recursive_bisection, or install "
              "libmetis-dev and build again.");
    GTEST_SKIP() << "no METIS in this build";
  }
  for (const int parts : {1, 2, 4, 12}) {
    const auto partition = Partition::metis(300, cloud.edge_index, parts);
    expect_consistent(partition);
    EXPECT_EQ(Partition::metis(300, cloud.edge_index, parts).digest(), partition.digest());
    // It promises parts within a few percent, not within one node.
    EXPECT_LE(*std::max_element(partition.sizes().begin(), partition.sizes().end()),
              1.1 * 300 / parts + 1);
    // Ranks that are threads ask at the same time.
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        EXPECT_EQ(Partition::metis(300, cloud.edge_index, parts).digest(), partition.digest());
      });
    }
    for (auto& thread : threads) thread.join();
    const auto in_order = Partition::contiguous(300, parts);
    if (parts > 1) {
      EXPECT_LT(mean_of(halos_of(partition, cloud.edge_index)),
                0.75 * mean_of(halos_of(in_order, cloud.edge_index)));
    }
  }
}

TEST(Partition, MetisLeavesNoPartEmptyAndNamesWrongInput) {
  if (!Partition::has_metis()) GTEST_SKIP() << "no METIS in this build";
  const at::Tensor none = at::zeros({2, 0}, at::kLong);
  for (const std::int64_t nodes : {0, 1, 3, 4, 5}) {
    const auto partition = Partition::metis(nodes, none, 4);
    expect_consistent(partition);
    if (nodes >= 4) {
      EXPECT_GT(*std::min_element(partition.sizes().begin(), partition.sizes().end()), 0);
    }
  }
  // Two cliques and one bridge: the bridge is cut.
  std::vector<std::int64_t> ends[2];
  for (std::int64_t clique = 0; clique < 2; ++clique) {
    for (std::int64_t i = 0; i < 6; ++i) {
      for (std::int64_t j = 0; j < 6; ++j) {
        if (i == j) continue;
        ends[0].push_back(6 * clique + i);
        ends[1].push_back(6 * clique + j);
      }
    }
  }
  ends[0].push_back(5);
  ends[1].push_back(6);
  const at::Tensor edges =
      at::stack({at::tensor(ends[0], at::kLong), at::tensor(ends[1], at::kLong)});
  const at::Tensor owners = Partition::metis(12, edges, 2).owners();
  EXPECT_TRUE((owners.narrow(0, 0, 6) == owners[0]).all().item<bool>());
  EXPECT_TRUE((owners.narrow(0, 6, 6) == 1 - owners[0]).all().item<bool>());
  // The weights of one clique: three of its nodes and one of the other balance the rest.
  const at::Tensor weights = at::where(at::arange(12) < 6, 3.0, 1.0);
  const auto weighted = Partition::metis(12, edges, 2, weights);
  for (int part = 0; part < 2; ++part) {
    EXPECT_NEAR(weights.index_select(0, weighted.nodes_of(part)).sum().item<double>(), 12, 1.5);
  }
  EXPECT_EQ(error_text([&] { Partition::metis(3, edges, 2); }),
            "graph.metis: edge 2 points to node 3, but the graph has 3 nodes (0 to 2).");
  EXPECT_EQ(error_text([&] { Partition::metis(3, at::zeros({3, 1}, at::kLong), 2); }),
            "graph.metis: the edges have shape [3, 1], not [2, edges].");
}

}  // namespace
}  // namespace tessera::graph_parallel
