#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "gnn/model.h"
#include "gnn/partitioner.h"
#include "support/ranks.h"
#include "tessera/comm/mesh.h"

namespace tessera::workloads::gnn {
namespace {

using comm::Group;
using tessera::testing::run_ranks;

const StructureOptions kSmall{.num_atoms = 30, .cutoff = 1.7};

ModelOptions small_model(bool overlap = true) {
  return {.num_features = 8,
          .num_layers = 2,
          .num_basis = 5,
          .cutoff = 1.7,
          .overlap = overlap,
          .dtype = at::kDouble};
}

struct Answers {
  at::Tensor energy;
  at::Tensor forces;
  at::Tensor stress;
  at::Tensor parameter_gradient;  // of a force loss: a second derivative
  at::Tensor hessian_product;
};

Answers answers_of(const Group& group, const Structure& structure, const std::string& partition,
                   bool overlap) {
  Model model(small_model(overlap), 3);
  const auto parts = make_partition(partition, structure.positions, structure.box,
                                    structure.neighbours.edge_index, group.size());
  const LocalGraph graph = make_local_graph(structure, parts, group);
  const at::Tensor positions = structure.positions.clone().requires_grad_(true);
  const Prediction prediction = model.predict(graph, positions, structure.box.cell, true, true);
  const at::Tensor loss = (prediction.forces - structure.forces).pow(2).mean() +
                          prediction.energy.pow(2) + prediction.stress.pow(2).sum();
  const at::Tensor direction = structure.forces / structure.forces.norm();
  Answers answers;
  answers.energy = prediction.energy.detach();
  answers.forces = prediction.forces.detach();
  answers.stress = prediction.stress.detach();
  answers.parameter_gradient =
      torch::autograd::grad({loss}, {model.parameters()}, {}, /*retain_graph=*/true)[0];
  answers.hessian_product =
      -torch::autograd::grad({(prediction.forces * direction).sum()}, {positions})[0];
  return answers;
}

void expect_close(const at::Tensor& a, const at::Tensor& b, const char* what) {
  const double scale = b.abs().max().item<double>();
  EXPECT_LE((a - b).abs().max().item<double>(), 1e-11 * scale) << what << "\n" << a << "\n" << b;
}

void expect_same(const Answers& a, const Answers& b) {
  expect_close(a.energy, b.energy, "energy");
  expect_close(a.forces, b.forces, "forces");
  expect_close(a.stress, b.stress, "stress");
  expect_close(a.parameter_gradient, b.parameter_gradient, "gradient of the force loss");
  expect_close(a.hessian_product, b.hessian_product, "Hessian-vector product");
}

Answers answers_alone(const Structure& structure) {
  Answers alone;
  run_ranks(1,
            [&](const Group& group) { alone = answers_of(group, structure, "contiguous", false); });
  return alone;
}

class GnnModel : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, GnnModel, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(GnnModel, EqualsOneProcessForEveryPartition) {
  const Structure structure = make_structure(kSmall, 1);
  const Answers alone = answers_alone(structure);
  for (const std::string& partition : partitioner_names()) {
    for (const bool overlap : {false, true}) {
      run_ranks(GetParam(), [&](const Group& group) {
        expect_same(answers_of(group, structure, partition, overlap), alone);
      });
    }
  }
}

TEST(GnnModelMeshes, DataTimesGraphEqualsOneProcess) {
  const Structure structures[] = {make_structure(kSmall, 1), make_structure(kSmall, 2)};
  const Answers alone[] = {answers_alone(structures[0]), answers_alone(structures[1])};
  run_ranks(4, [&](const Group& world) {
    const comm::Mesh mesh(world, {{"data", 2}, {"graph", 2}});
    const int mine = mesh.coordinate("data");
    expect_same(answers_of(mesh.group("graph"), structures[mine], "bisection", true), alone[mine]);
  });
}

// More ranks than atoms: some own nothing.
TEST(GnnModelMeshes, RanksWithoutAtomsTakePart) {
  const Structure structure = make_structure({.num_atoms = 3, .cutoff = 1.7}, 4);
  const Answers alone = answers_alone(structure);
  run_ranks(5, [&](const Group& group) {
    expect_same(answers_of(group, structure, "bisection", true), alone);
  });
}

at::Tensor energy_at(const Model& model, const LocalGraph& graph, const at::Tensor& positions,
                     const at::Tensor& cell, const at::Tensor& strain) {
  const at::NoGradGuard guard;
  return model.energy(graph, positions, cell, strain);
}

TEST(GnnModelPhysics, ForcesAndStressAreDifferencesOfTheEnergy) {
  run_ranks(2, [](const Group& group) {
    const Structure structure = make_structure(kSmall, 5);
    const Model model(small_model(), 6);
    const auto parts = make_partition("hilbert", structure.positions, structure.box,
                                      structure.neighbours.edge_index, group.size());
    const LocalGraph graph = make_local_graph(structure, parts, group);
    const at::Tensor& cell = structure.box.cell;
    const Prediction prediction = model.predict(graph, structure.positions, cell, true, false);
    const at::Tensor none = at::zeros({3, 3}, at::kDouble);
    constexpr double kStep = 1e-5;
    for (const int atom : {0, 7, 29}) {
      for (int axis = 0; axis < 3; ++axis) {
        at::Tensor there = structure.positions.clone();
        at::Tensor back = structure.positions.clone();
        there[atom][axis] += kStep;
        back[atom][axis] -= kStep;
        const double slope =
            (energy_at(model, graph, there, cell, none) - energy_at(model, graph, back, cell, none))
                .item<double>() /
            (2 * kStep);
        EXPECT_NEAR(prediction.forces[atom][axis].item<double>(), -slope, 1e-6);
      }
    }
    const double volume = at::det(cell).item<double>();
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 3; ++j) {
        at::Tensor stretch = none.clone();
        stretch[i][j] = kStep;
        const double slope = (energy_at(model, graph, structure.positions, cell, stretch) -
                              energy_at(model, graph, structure.positions, cell, -stretch))
                                 .item<double>() /
                             (2 * kStep);
        EXPECT_NEAR(prediction.stress[i][j].item<double>() * volume, slope, 1e-6);
      }
    }
    EXPECT_LE(prediction.forces.sum(0).abs().max().item<double>(), 1e-10);
  });
}

TEST(GnnModelPhysics, LabelsAreDifferencesOfTheirEnergy) {
  const Structure structure = make_structure(kSmall, 7);
  EXPECT_LE(structure.forces.sum(0).abs().max().item<double>(), 1e-10);
  EXPECT_GT(structure.forces.abs().mean().item<double>(), 0.1);
}

TEST(GnnModelPhysics, NeighboursAreThoseOfAllImages) {
  // A box smaller than the cutoff, skewed: every image within reach is found once.
  const at::Tensor cell =
      at::tensor({1.3, 0.0, 0.0, 0.4, 1.1, 0.0, -0.2, 0.3, 1.5}, at::kDouble).view({3, 3});
  auto generator = at::make_generator<at::CPUGeneratorImpl>(8);
  const at::Tensor positions = at::rand({5, 3}, generator, at::TensorOptions(at::kDouble)) * 4 - 2;
  const double cutoff = 1.9;
  const Neighbours found = within(positions, {.cell = cell}, cutoff);
  std::int64_t expected = 0;
  for (int i = 0; i < 5; ++i) {
    for (int j = 0; j < 5; ++j) {
      for (int a = -8; a <= 8; ++a) {
        for (int b = -8; b <= 8; ++b) {
          for (int c = -8; c <= 8; ++c) {
            const at::Tensor shift = at::tensor({double(a), double(b), double(c)}, at::kDouble);
            const double d =
                (positions[i] + shift.matmul(cell) - positions[j]).norm().item<double>();
            expected += d > 1e-12 && d < cutoff ? 1 : 0;
          }
        }
      }
    }
  }
  EXPECT_EQ(found.edge_index.size(1), expected);
  const at::Tensor lengths =
      (positions.index_select(0, found.edge_index[0]) + found.shifts.matmul(cell) -
       positions.index_select(0, found.edge_index[1]))
          .norm(2, 1);
  EXPECT_LT(lengths.max().item<double>(), cutoff);
  const Neighbours near = nearest(positions, {.cell = cell}, 7);
  EXPECT_EQ(near.edge_index.size(1), 35);
}

}  // namespace
}  // namespace tessera::workloads::gnn
