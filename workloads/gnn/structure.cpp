#include "gnn/structure.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "gnn/lennard_jones.h"
#include "tessera/core/check.h"

namespace tessera::workloads::gnn {

Structure make_structure(const StructureOptions& options, std::uint64_t seed) {
  TESSERA_CHECK_VALUE(options.num_atoms > 0, "gnn.structure: ", options.num_atoms,
                      " atoms were asked for. Ask for at least one.");
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto real = at::TensorOptions(at::kDouble);
  const auto side = static_cast<std::int64_t>(
      std::ceil(std::cbrt(static_cast<double>(options.num_atoms)) - 1e-9));
  const at::Tensor line = at::arange(side, real);
  const at::Tensor sites = at::stack(at::meshgrid({line, line, line}, "ij"), -1).view({-1, 3});
  const at::Tensor chosen =
      at::randperm(side * side * side, generator, at::TensorOptions(at::kLong))
          .narrow(0, 0, options.num_atoms);
  Structure structure;
  structure.positions = (sites.index_select(0, chosen) + 0.5) * options.spacing +
                        at::randn({options.num_atoms, 3}, generator, real) * options.jitter;
  structure.box.cell = at::eye(3, real) * (static_cast<double>(side) * options.spacing);
  structure.types = at::randint(0, 2, {options.num_atoms}, generator, at::TensorOptions(at::kLong));
  structure.neighbours = within(structure.positions, structure.box, options.cutoff);
  const at::Tensor positions = structure.positions.clone().requires_grad_(true);
  const at::Tensor energy = lennard_jones(positions, structure.box.cell, structure.types,
                                          structure.neighbours, options.cutoff);
  structure.forces =
      -torch::autograd::grad({energy}, {positions}, {}, std::nullopt, false, true)[0];
  structure.energy = energy.detach();
  return structure;
}

}  // namespace tessera::workloads::gnn
