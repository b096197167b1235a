#include "tessera/comm/mesh.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "support/ranks.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"

namespace tessera::comm {
namespace {

using tessera::testing::run_ranks;
using tessera::testing::run_ranks_collecting;
using tessera::testing::text_of;

// The world ranks of a group, as its members see them.
std::vector<int> ranks_of(const Group& group, const Group& world) {
  const at::Tensor mine = at::full({1}, world.rank(), at::kLong);
  const at::Tensor all = all_gather(mine, group);
  std::vector<int> ranks;
  for (int i = 0; i < group.size(); ++i) {
    ranks.push_back(static_cast<int>(all[i].item<std::int64_t>()));
    EXPECT_EQ(group.world_rank(i), ranks.back());
  }
  return ranks;
}

TEST(Mesh, TwoAxesAreRowMajor) {
  run_ranks(6, [](const Group& world) {
    const Mesh mesh(world, {{"data", 2}, {"vocab", 3}});
    EXPECT_EQ(mesh.coordinate("data"), world.rank() / 3);
    EXPECT_EQ(mesh.coordinate("vocab"), world.rank() % 3);
    EXPECT_EQ(mesh.size("data"), 2);
    EXPECT_EQ(mesh.size("vocab"), 3);
    EXPECT_EQ(mesh.group("vocab").name(), "vocab");
    EXPECT_EQ(mesh.group("vocab").rank(), mesh.coordinate("vocab"));
    const int row = world.rank() / 3 * 3;
    EXPECT_EQ(ranks_of(mesh.group("vocab"), world), (std::vector<int>{row, row + 1, row + 2}));
    const int column = world.rank() % 3;
    EXPECT_EQ(ranks_of(mesh.group("data"), world), (std::vector<int>{column, column + 3}));
  });
}

TEST(Mesh, ThreeAxesAndFlatten) {
  run_ranks(8, [](const Group& world) {
    const Mesh mesh(world, {{"data", 2}, {"stage", 2}, {"model", 2}});
    const int data = mesh.coordinate("data");
    const int stage = mesh.coordinate("stage");
    const int model = mesh.coordinate("model");
    EXPECT_EQ(data * 4 + stage * 2 + model, world.rank());
    EXPECT_EQ(ranks_of(mesh.group("stage"), world),
              (std::vector<int>{data * 4 + model, data * 4 + 2 + model}));
    // The order of the names does not matter.
    const Group flat =
        world.rank() % 2 == 0 ? mesh.flatten({"data", "model"}) : mesh.flatten({"model", "data"});
    EXPECT_EQ(flat.name(), "data+model");
    EXPECT_EQ(ranks_of(flat, world),
              (std::vector<int>{stage * 2, stage * 2 + 1, 4 + stage * 2, 4 + stage * 2 + 1}));
    EXPECT_EQ(ranks_of(mesh.flatten({"data", "stage", "model"}), world).size(), 8U);
    EXPECT_EQ(mesh.flatten({"model"}).size(), 2);
  });
}

TEST(Mesh, AxesOfSizeOneHaveGroups) {
  run_ranks(3, [](const Group& world) {
    const Mesh mesh(world, {{"replica", 1}, {"data", 3}});
    EXPECT_EQ(mesh.group("replica").size(), 1);
    EXPECT_EQ(mesh.group("data").size(), 3);
    at::Tensor one = at::ones({2});
    all_reduce_(one, mesh.group("replica"));
    EXPECT_EQ(one[0].item<float>(), 1);
  });
}

TEST(Mesh, OneRank) {
  run_ranks(1, [](const Group& world) {
    const Mesh mesh(world, {{"data", 1}});
    EXPECT_EQ(mesh.coordinate("data"), 0);
    EXPECT_EQ(mesh.axes().size(), 1U);
    EXPECT_TRUE(mesh.world() == world);
  });
}

TEST(Mesh, TwoMeshesOverOneWorld) {
  run_ranks(4, [](const Group& world) {
    const Mesh first(world, {{"data", 2}, {"model", 2}});
    const Mesh second(world, {{"data", 4}, {"model", 1}});
    EXPECT_EQ(first.group("data").size(), 2);
    EXPECT_EQ(second.group("data").size(), 4);
    at::Tensor ones = at::ones({1});
    all_reduce_(ones, second.group("data"));
    all_reduce_(ones, first.group("data"));
    EXPECT_EQ(ones.item<float>(), 8);
  });
}

std::string error_of(int size, const std::vector<Axis>& axes) {
  std::string text;
  const auto errors = run_ranks_collecting(size, [&](const Group& world) { Mesh(world, axes); });
  for (const auto& error : errors) {
    EXPECT_EQ(text_of(error), text_of(errors[0]));
  }
  return text_of(errors[0]);
}

TEST(Mesh, WrongAxesAreRefusedOnAllRanks) {
  EXPECT_EQ(
      error_of(3, {{"data", 2}, {"model", 2}}),
      "comm.mesh: data 2 x model 2 makes 4 places for 3 ranks. The sizes must multiply to 3.");
  EXPECT_EQ(error_of(2, {}), "comm.mesh: a mesh has at least one axis.");
  EXPECT_EQ(error_of(2, {{"", 2}}), "comm.mesh: axis 0 has no name.");
  EXPECT_EQ(error_of(2, {{"data", 0}}), "comm.mesh: axis 'data' has size 0.");
  EXPECT_EQ(error_of(2, {{"data", 2}, {"data", 1}}), "comm.mesh: two axes are named 'data'.");
}

TEST(Mesh, DisagreementIsRaisedOnAllRanks) {
  const auto errors = run_ranks_collecting(4, [](const Group& world) {
    const bool is_odd = world.rank() == 2;
    Mesh(world, {{"data", is_odd ? 4 : 2}, {"model", is_odd ? 1 : 2}});
  });
  for (const auto& error : errors) {
    EXPECT_EQ(
        text_of(error),
        "comm.mesh: rank 0 asks for data 2 x model 2, rank 2 for data 4 x model 1. Give every "
        "rank the same axes.");
    try {
      std::rethrow_exception(error);
    } catch (const Error& caught) {
      EXPECT_EQ(caught.kind(), ErrorKind::kMismatch);
      EXPECT_EQ(caught.ranks(), std::vector<int>{2});
    }
  }
}

TEST(Mesh, DisagreementOnLengthOfNamesIsRaisedToo) {
  const auto errors = run_ranks_collecting(2, [](const Group& world) {
    Mesh(world, {{world.rank() == 0 ? "data" : "a_much_longer_name", 2}});
  });
  EXPECT_EQ(text_of(errors[0]), text_of(errors[1]));
  EXPECT_EQ(
      text_of(errors[0]),
      "comm.mesh: rank 0 asks for data 2, rank 1 for a_much_longer_name 2. Give every rank the "
      "same axes.");
}

TEST(Mesh, UnknownAxesAreNamed) {
  run_ranks(2, [](const Group& world) {
    const Mesh mesh(world, {{"data", 2}});
    const auto text = [](const std::function<void()>& work) {
      try {
        work();
      } catch (...) {
        return text_of(std::current_exception());
      }
      return std::string();
    };
    EXPECT_EQ(text([&] { mesh.group("model"); }),
              "comm.mesh: there is no axis 'model' in the mesh data 2.");
    EXPECT_EQ(text([&] { mesh.flatten({}); }), "comm.mesh: name at least one axis to flatten.");
    EXPECT_EQ(text([&] { mesh.flatten({"data", "data"}); }),
              "comm.mesh: axis 'data' is named twice.");
  });
}

TEST(Mesh, CurrentMeshIsPerThreadAndNested) {
  run_ranks(2, [](const Group& world) {
    EXPECT_EQ(CurrentMesh::get(), nullptr);
    const CurrentMesh outer(Mesh(world, {{"data", 2}}));
    EXPECT_EQ(CurrentMesh::get()->axes()[0].name, "data");
    {
      const CurrentMesh inner(Mesh(world, {{"model", 2}}));
      EXPECT_EQ(CurrentMesh::get()->axes()[0].name, "model");
      EXPECT_EQ(CurrentMesh::get()->group("model").rank(), world.rank());
    }
    EXPECT_EQ(CurrentMesh::get()->axes()[0].name, "data");
  });
}

}  // namespace
}  // namespace tessera::comm
