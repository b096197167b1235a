// gnn/settings.h — what `tessera train gnn` can be told. No LibTorch.

#pragma once

#include <cstdint>
#include <string>

#include "trainer/settings.h"

namespace tessera::workloads::gnn {

struct Settings : trainer::Settings {
  int graph_parallel = 0;  // ranks that share one graph; 0: all
  std::string partition = "bisection";
  std::int64_t num_atoms = 216;
  std::int64_t num_structures = 16;  // for training; a quarter as many, at least one, to judge
  std::int64_t num_features = 32;
  std::int64_t num_layers = 2;
  std::string data;       // files of structures; empty: the program makes its own
  std::string eval_data;  // files to judge on; empty: the last tenth of `data`
  std::string energy_key = "energy";
  std::string forces_key = "forces";
  std::string stress_key = "stress";
  double stress_weight = 0;  // of `data`
  std::int64_t epochs = 0;   // through the structures; 0: num_steps counts
  bool shuffle = false;      // structures of each rank, anew every epoch
  double cutoff = 2.2;
  double force_weight = 1.0;  // beside the energy per atom
  std::string optimizer = "adam";
  std::string precision = "float32";
  bool no_overlap = false;

  Settings();
  settings::Table table() override;
  void check() const override;
  int graph_ranks() const { return graph_parallel == 0 ? num_ranks : graph_parallel; }
  std::int64_t data_ranks() const override { return num_ranks / graph_ranks(); }
};

}  // namespace tessera::workloads::gnn
