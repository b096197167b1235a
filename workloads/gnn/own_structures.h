// gnn/own_structures.h — structures of people's own, from files, as the network trains on them.

#pragma once

#include <string>
#include <vector>

#include "gnn/extended_xyz.h"
#include "gnn/settings.h"
#include "gnn/structure.h"

namespace tessera::workloads::gnn {

struct OwnStructures {
  std::vector<XyzFrame> training;
  std::vector<XyzFrame> judged;
  std::vector<std::string> species;  // in order of their names; types are places in it
  std::vector<std::string> files;    // that were read
  /// [species], double: energy of an atom of each, by least squares over the training's energies.
  /// What the network learns is the rest.
  at::Tensor atomic_energies;

  double mean_atoms() const;  // of the training's structures
};

/// Reads the files that the settings name, and judges on the last tenth unless they name others.
/// The same on all ranks. Throws DataError for files that cannot be read, for structures without
/// energy and forces, and if the settings ask for what no structure has: a key of their own,
/// stress.
OwnStructures read_structures(const Settings& settings);

/// The structures of `data` to be judged, for a model that knows `species`; their atomic energies
/// are the model's. Throws DataError also for an element that it does not know, and, if
/// `needs_labels`, for structures without energy and forces.
OwnStructures read_to_judge(const Settings& settings, const std::string& data,
                            std::vector<std::string> species, bool needs_labels);

/// How many of `frames` have an energy, forces and stress: "energies of 20, forces of 12".
std::string labels_text(const std::vector<XyzFrame>& frames);

/// Species of `judged` that `training` has not, with commas between them.
std::string unseen_species(const OwnStructures& all);

/// One of them with its neighbours; `energy`, `forces` and `stress` are undefined where the file
/// has none.
Structure structure_of(const XyzFrame& frame, const OwnStructures& all, double cutoff);

/// [species], double: how many of its atoms are of each.
at::Tensor counts_of(const XyzFrame& frame, const OwnStructures& all);

}  // namespace tessera::workloads::gnn
