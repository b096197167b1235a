#include "tessera/graph_parallel/gp_group.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/ranks.h"
#include "tessera/comm/mesh.h"
#include "tessera/graph_parallel/model_parallel_regions.h"
#include "tessera/graph_parallel/tensor_parts.h"

namespace tessera::graph_parallel {
namespace {

using comm::Group;
using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

std::vector<int> members_of(const Group& group) {
  std::vector<int> members;
  for (int r = 0; r < group.size(); ++r) members.push_back(group.world_rank(r));
  return members;
}

// The groups of a rank, set up for the body and gone after it.
void with_gp(const Group& world, int size, const std::function<void()>& body) {
  setup_gp({.gp_gpus = size}, world);
  body();
  cleanup_gp();
}

TEST(GpGroup, DivisionChecksForARemainder) {
  ensure_div(8, 4);
  EXPECT_EQ(divide_and_check_no_remainder(12, 4), 3);
  try {
    divide_and_check_no_remainder(7, 2);
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "graph.ensure_div: 7 is not divisible by 2.");
  }
}

TEST(GpGroup, RowsAreGraphsAndColumnsAreData) {
  for (const int size : {1, 2, 4, 8}) {
    run_ranks(8, [&](const Group& world) {
      with_gp(world, size, [&] {
        std::vector<int> row;
        std::vector<int> column;
        for (int i = 0; i < size; ++i) row.push_back(world.rank() / size * size + i);
        for (int i = 0; i < 8 / size; ++i) column.push_back(world.rank() % size + i * size);
        EXPECT_EQ(members_of(*get_gp_group()), row);
        EXPECT_EQ(members_of(*get_dp_group()), column);
        EXPECT_EQ(get_gp_rank(), world.rank() % size);
        EXPECT_EQ(get_dp_rank(), world.rank() / size);
        EXPECT_EQ(get_gp_world_size(), size);
        EXPECT_EQ(get_dp_world_size(), 8 / size);
      });
    });
  }
}

TEST(GpGroup, AGroupLargerThanTheWorldIsTheWorld) {
  run_ranks(
      2, [](const Group& world) { with_gp(world, 16, [] { EXPECT_EQ(get_gp_world_size(), 2); }); });
}

TEST(GpGroup, ASizeThatDoesNotDivideIsRefusedEverywhere) {
  for (const auto& error :
       run_ranks_collecting(8, [](const Group& world) { setup_gp({.gp_gpus = 3}, world); })) {
    EXPECT_EQ(text_of(error),
              "graph.setup_gp: 8 ranks cannot be divided into groups of 3. Choose 1, 2, 4 or 8.");
  }
  for (const auto& error :
       run_ranks_collecting(2, [](const Group& world) { setup_gp({.gp_gpus = 0}, world); })) {
    EXPECT_EQ(text_of(error), "graph.setup_gp: a group of 0 ranks is not possible.");
  }
}

TEST(GpGroup, RanksThatAskForDifferentSizesAreTold) {
  // Also where one of the sizes is wrong by itself.
  for (const int other : {4, 3, 0}) {
    for (const auto& error : run_ranks_collecting(4, [other](const Group& world) {
           setup_gp({.gp_gpus = world.rank() == 3 ? other : 2}, world);
         })) {
      EXPECT_EQ(text_of(error),
                "graph.setup_gp: rank 0 asks for groups of 2, rank 3 for groups of " +
                    std::to_string(other) + ". Give every rank the same configuration.");
    }
  }
}

TEST(GpGroup, SetUpTearDownSetUp) {
  run_ranks(4, [](const Group& world) {
    EXPECT_FALSE(initialized());
    setup_gp({.gp_gpus = 2}, world);
    EXPECT_TRUE(initialized());
    EXPECT_THROW(setup_gp({.gp_gpus = 2}, world), c10::ValueError);
    cleanup_gp();
    EXPECT_FALSE(initialized());
    EXPECT_EQ(get_gp_group(), nullptr);
    cleanup_gp();
    setup_gp({.gp_gpus = 4}, world);
    EXPECT_EQ(get_gp_world_size(), 4);
    cleanup_gp();
  });
}

TEST(GpGroup, GettersBeforeSetupDescribeAWorldOfOne) {
  EXPECT_EQ(get_gp_group(), nullptr);
  EXPECT_EQ(get_dp_group(), nullptr);
  EXPECT_EQ(get_gp_rank(), 0);
  EXPECT_EQ(get_dp_rank(), 0);
  EXPECT_EQ(get_gp_world_size(), 1);
  EXPECT_EQ(get_dp_world_size(), 1);
}

TEST(GpGroup, AMeshOfTheProgramCounts) {
  run_ranks(2, [](const Group& world) {
    const comm::CurrentMesh current(comm::Mesh(world, {{"graph", 2}}));
    EXPECT_TRUE(initialized());
    EXPECT_EQ(get_gp_world_size(), 2);
    EXPECT_EQ(get_dp_world_size(), 1);
  });
}

TEST(TensorParts, PaddingIsZero) {
  const at::Tensor x = at::ones({2, 5}).requires_grad_(true);
  const at::Tensor padded = pad_tensor(x, -1, std::nullopt, 4);
  EXPECT_EQ(padded.sizes(), (at::IntArrayRef{2, 8}));
  EXPECT_EQ(padded.narrow(1, 5, 3).abs().sum().item<float>(), 0);
  torch::autograd::backward({padded.sum()});
  EXPECT_TRUE(at::equal(x.grad(), at::ones({2, 5})));
  EXPECT_EQ(pad_tensor(x, 0, 7).size(0), 7);
  EXPECT_TRUE(pad_tensor(x, 0, std::nullopt, 2).is_same(x));
  try {
    pad_tensor(x, 1, 3);
    FAIL();
  } catch (const c10::ValueError& error) {
    EXPECT_STREQ(error.what_without_backtrace(),
                 "graph.pad_tensor: dimension 1 has 5 entries, more than the target of 3.");
  }
}

TEST(TensorParts, TrimmingLeavesTheSizesGivenAlone) {
  const at::Tensor x = at::arange(11).view({11, 1});
  const at::Tensor sizes = at::tensor({5, 4, 2}, at::kLong);
  const auto [trimmed, left] = trim_tensor(x, sizes, 0, 4);
  EXPECT_EQ(trimmed.size(0), 8);
  EXPECT_TRUE(at::equal(left, at::tensor({5, 3, 0}, at::kLong)));
  EXPECT_TRUE(at::equal(sizes, at::tensor({5, 4, 2}, at::kLong)));
  EXPECT_EQ(trim_tensor(x.t(), {}, -1, 4).first.size(1), 8);
}

TEST(TensorParts, SplittingGivesEveryPartAPiece) {
  for (const int extent : {5, 6, 9, 3, 0}) {
    const auto parts = _split_tensor(at::arange(extent), 4);
    ASSERT_EQ(parts.size(), 4U);
    for (const at::Tensor& part : parts) {
      EXPECT_LE(std::abs(part.size(0) - extent / 4), 1);
    }
    EXPECT_TRUE(at::equal(at::cat(parts), at::arange(extent)));
  }
  EXPECT_TRUE(_split_tensor(at::ones({2, 4}), 2, -1, true)[1].is_contiguous());
}

TEST(ModelParallelRegions, AreTheRegionsOverTheGraphGroup) {
  for (const int size : {1, 2, 3, 4}) {
    run_ranks(size, [&](const Group& world) {
      with_gp(world, size, [&] {
        const at::Tensor x = at::full({2, 2}, double(world.rank() + 1), at::kDouble);
        EXPECT_TRUE(at::equal(reduce_from_model_parallel_region(x),
                              at::full({2, 2}, size * (size + 1) / 2.0, at::kDouble)));
        EXPECT_TRUE(at::equal(_reduce(nullptr, x), reduce_from_model_parallel_region(x)));
        const at::Tensor whole = at::arange(7, at::kDouble).view({1, 7});
        const at::Tensor mine = scatter_to_model_parallel_region(whole);
        EXPECT_TRUE(at::equal(_split(whole), mine));
        EXPECT_TRUE(at::equal(gather_from_model_parallel_region(mine), whole));
        EXPECT_TRUE(at::equal(_gather_with_padding(mine), whole));
        EXPECT_EQ(_gather(x, 0).size(0), 2 * size);
        EXPECT_TRUE(at::equal(CopyToModelParallelRegion::apply(whole), whole));
        EXPECT_TRUE(at::equal(ReduceFromModelParallelRegion::apply(whole), whole * size));
        EXPECT_TRUE(at::equal(ScatterToModelParallelRegion::apply(whole, 1), mine));
        EXPECT_TRUE(at::equal(GatherFromModelParallelRegion::apply(mine, 1), whole));
      });
    });
  }
}

TEST(ModelParallelRegions, BeforeSetupAreTheIdentity) {
  const at::Tensor x = at::ones({3, 3});
  EXPECT_TRUE(copy_to_model_parallel_region(x).is_same(x));
  EXPECT_TRUE(reduce_from_model_parallel_region(x).is_same(x));
  EXPECT_TRUE(scatter_to_model_parallel_region(x).is_same(x));
  EXPECT_TRUE(gather_from_model_parallel_region(x).is_same(x));
  EXPECT_TRUE(_gather(x).is_same(x));
}

}  // namespace
}  // namespace tessera::graph_parallel
