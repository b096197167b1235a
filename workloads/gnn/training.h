// gnn/training.h — trains the network on energies and forces, over a data x graph mesh.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gnn/model.h"
#include "tessera/comm/mesh.h"

namespace tessera::workloads::gnn {

struct TrainingOptions {
  ModelOptions model;
  StructureOptions structure;
  std::int64_t num_structures = 16;  // for training; a quarter as many, at least one, to judge
  std::int64_t num_steps = 200;
  std::int64_t batch = 1;  // structures per step and data-parallel rank
  double learning_rate = 0.003;
  double force_weight = 1.0;  // beside the energy per atom
  std::string partition = "bisection";
  std::string optimizer = "adam";  // or "sgd"
  std::uint64_t seed = 1;
};

struct Errors {
  double energy_per_atom = 0;  // mean absolute
  double force = 0;            // mean absolute, per component
};

/// One step, as the progress line shows it.
struct Progress {
  std::int64_t step = 0;
  double loss = 0;
  double seconds = 0;  // of this step
  double atoms_per_second = 0;
};

struct Summary {
  std::int64_t num_parameters = 0;
  double halo_rows = 0;  // mean over this job's ranks and structures
  Errors before;
  Errors after;
  at::Tensor parameters;
};

/// Sums a structure's losses over data-parallel ranks and steps the parameters; all ranks end with
/// the same. Collective over the mesh, which has the axes "data" and "graph". `report` is called on
/// every rank after each step. Throws ValueError for options that make no sense.
Summary train(const TrainingOptions& options, const comm::Mesh& mesh,
              const std::function<void(const Progress&)>& report = {});

}  // namespace tessera::workloads::gnn
