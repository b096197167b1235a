#include "tessera/graph_parallel/halo_plan.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "graph_parallel/graphs.h"
#include "support/ranks.h"
#include "support/wrapped_group.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"
#include "tessera/graph_parallel/halo.h"

namespace tessera::graph_parallel {
namespace {

using comm::Engine;
using comm::Group;
using tessera::testing::periodic_cloud;
using tessera::testing::random_edges;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::test_options;
using tessera::testing::text_of;

at::Tensor edges_for(const at::Tensor& edges, const Partition& partition, const Group& group) {
  return edges.index_select(1, edges_of_part(edges, partition, group.rank()));
}

// The last rank of three and more owns nothing.
Partition scattered(std::int64_t num_nodes, int num_parts, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const int num_owners = num_parts > 2 ? num_parts - 1 : num_parts;
  return Partition::from_owners(
      at::randint(0, num_owners, {num_nodes}, generator, at::TensorOptions(at::kLong)), num_parts);
}

void expect_sound(const HaloPlan& plan, const at::Tensor& edges) {
  const Group& group = plan.group();
  EXPECT_EQ(plan.send_rows()[group.rank()], 0);
  EXPECT_EQ(plan.recv_rows()[group.rank()], 0);
  EXPECT_TRUE(
      at::equal(plan.nodes().index_select(0, plan.local_edges().flatten()), edges.flatten()));
  EXPECT_TRUE((plan.local_edges()[1] < plan.num_owned()).all().item<bool>());
  EXPECT_TRUE((plan.local_edges()[0].index_select(0, plan.interior()) < plan.num_owned())
                  .all()
                  .item<bool>());
  EXPECT_TRUE((plan.local_edges()[0].index_select(0, plan.boundary()) >= plan.num_owned())
                  .all()
                  .item<bool>());
  EXPECT_EQ(plan.interior().size(0) + plan.boundary().size(0), edges.size(1));
  // What is sent, told to the receiver by global id, is what it expects.
  const at::Tensor sent = plan.nodes().index_select(0, plan.send_index());
  const at::Tensor arrived = comm::all_to_all_v(sent, plan.send_rows(), group, plan.recv_rows());
  EXPECT_TRUE(at::equal(arrived, plan.halo_nodes()));
  plan.verify();
  // Owned and halo rows are the rows of the whole graph.
  const at::Tensor rows = at::arange(plan.partition().num_nodes() * 2, at::kDouble).view({-1, 2});
  const at::Tensor owned = rows.index_select(0, plan.partition().nodes_of(group.rank()));
  EXPECT_TRUE(at::equal(halo_extend(owned, plan), rows.index_select(0, plan.nodes())));
}

class HaloPlans : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, HaloPlans, ::testing::Values(1, 2, 3, 4));

TEST_P(HaloPlans, OfAGraphWithoutSymmetry) {
  for (const Engine engine : {Engine::kShm, Engine::kGloo}) {
    run_ranks(
        GetParam(),
        [&](const Group& group) {
          const at::Tensor edges = random_edges(40, 150, 3);
          for (const auto& partition :
               {scattered(40, GetParam(), 5), Partition::contiguous(40, GetParam())}) {
            const at::Tensor mine = edges_for(edges, partition, group);
            expect_sound(HaloPlan(partition, mine, group), mine);
          }
        },
        test_options(engine));
  }
}

TEST_P(HaloPlans, OfASymmetricGraphAreTheSameWithoutMessages) {
  run_ranks(GetParam(), [&](const Group& group) {
    const auto cloud = periodic_cloud(60, {4, 4, 4}, 1.3, 4);
    const auto partition = scattered(60, GetParam(), 6);
    const at::Tensor mine = edges_for(cloud.edge_index, partition, group);
    const HaloPlan learnt(partition, mine, group);
    const auto traffic = std::make_shared<tessera::testing::Traffic>();
    const Group counted = tessera::testing::wrapped_group(group, traffic);
    const HaloPlan silent(partition, mine, counted, {.is_symmetric = true, .check = false});
    EXPECT_EQ(traffic->num_calls, 0);
    const HaloPlan checked(partition, mine, counted, {.is_symmetric = true});
    EXPECT_EQ(traffic->num_all_to_alls, 0);
    for (const HaloPlan& plan : {silent, checked}) {
      EXPECT_TRUE(at::equal(plan.send_index(), learnt.send_index()));
      EXPECT_EQ(plan.send_rows(), learnt.send_rows());
      EXPECT_TRUE(at::equal(plan.nodes(), learnt.nodes()));
    }
    expect_sound(checked, mine);
  });
}

TEST_P(HaloPlans, OfAGraphWithinItsPartsAreEmpty) {
  run_ranks(GetParam(), [&](const Group& group) {
    const auto partition = Partition::contiguous(12, GetParam());
    const at::Tensor self = partition.nodes_of(group.rank());
    const HaloPlan plan(partition, at::stack({self, self}), group, {.is_symmetric = true});
    EXPECT_EQ(plan.num_halo(), 0);
    EXPECT_EQ(plan.num_sent(), 0);
    EXPECT_EQ(plan.boundary().size(0), 0);
  });
}

TEST(HaloPlan, WithoutEdges) {
  run_ranks(2, [](const Group& group) {
    const HaloPlan plan(Partition::contiguous(1, 2), at::zeros({2, 0}, at::kLong), group);
    EXPECT_EQ(plan.num_halo(), 0);
    EXPECT_EQ(plan.num_owned(), group.rank() == 0 ? 1 : 0);
  });
}

// The text that the rank at fault and the others raise.
void expect_fault(const std::vector<std::exception_ptr>& errors, int wrong,
                  const std::string& text) {
  for (int r = 0; r < static_cast<int>(errors.size()); ++r) {
    EXPECT_EQ(
        text_of(errors[r]),
        r == wrong ? text : text + " (On rank " + std::to_string(wrong) + ", in group 'world'.)");
  }
}

TEST(HaloPlan, AFaultOfOneRankIsRaisedByAll) {
  const auto plan_with = [](std::int64_t source, std::int64_t target) {
    return run_ranks_collecting(3, [=](const Group& group) {
      const auto partition = Partition::contiguous(6, 3);
      at::Tensor edges = at::full({2, 2}, 2 * group.rank(), at::kLong);
      if (group.rank() == 1) {
        edges[0][1] = source;
        edges[1][1] = target;
      }
      HaloPlan(partition, edges, group);
    });
  };
  expect_fault(plan_with(2, 6), 1,
               "graph.halo: edge 1 points to node 6, but the graph has 6 nodes (0 to 5).");
  expect_fault(plan_with(-1, 2), 1,
               "graph.halo: edge 1 comes from node -1, but the graph has 6 nodes (0 to 5).");
  expect_fault(plan_with(0, 5), 1,
               "graph.halo: edge 1 points to node 5, which rank 2 owns. Give each rank the edges "
               "whose targets it owns (edges_of_part).");
}

TEST(HaloPlan, RanksWithDifferentPartitionsAreTold) {
  const auto errors = run_ranks_collecting(2, [](const Group& group) {
    const auto partition =
        group.rank() == 0 ? Partition::contiguous({2, 4}) : Partition::contiguous({3, 3});
    HaloPlan(partition, at::zeros({2, 0}, at::kLong), group);
  });
  for (const auto& error : errors) {
    EXPECT_NE(text_of(error).find("graph.halo: rank 0 has 6 nodes in 2 parts, digest "),
              std::string::npos)
        << text_of(error);
    EXPECT_NE(text_of(error).find("; rank 1 has 6 nodes in 2 parts"), std::string::npos);
  }
}

TEST(HaloPlan, AGraphThatIsNotSymmetricIsFound) {
  const auto errors = run_ranks_collecting(2, [](const Group& group) {
    const auto partition = Partition::contiguous(4, 2);
    // Only rank 1 has an edge, from node 0 to node 2.
    at::Tensor edges = at::zeros({2, group.rank()}, at::kLong);
    if (group.rank() == 1) edges[1][0] = 2;
    HaloPlan(partition, edges, group, {.is_symmetric = true});
  });
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error),
              "graph.halo: rank 0 would send 0 rows to rank 1, which expects 1. The graph is not "
              "symmetric: some edge lacks its mirror image. Build the plan without is_symmetric.");
  }
}

TEST(HaloPlan, WrongShapesAreNamed) {
  const auto texts = run_ranks_collecting(2, [](const Group& group) {
    HaloPlan(Partition::contiguous(4, 3), at::zeros({2, 0}, at::kLong), group);
  });
  EXPECT_EQ(text_of(texts[1]), "graph.halo: the partition has 3 parts, group 'world' has 2 ranks.");
  const auto others = run_ranks_collecting(1, [](const Group& group) {
    HaloPlan(Partition::contiguous(4, 1), at::zeros({3, 2}, at::kLong), group);
  });
  EXPECT_EQ(text_of(others[0]),
            "graph.halo: the edges must be a tensor of int64, [2, edges]: sources, then targets.");
}

}  // namespace
}  // namespace tessera::graph_parallel
