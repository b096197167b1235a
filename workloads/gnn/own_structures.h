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
  /// Energy of an atom of each species, by least squares over the training's energies: what the
  /// network learns is the rest.
  std::vector<double> atomic_energies;

  double mean_atoms() const;  // of the training's structures
};

/// Reads the files that the settings name, and judges on the last tenth unless they name others.
/// The same on all ranks. Throws DataError for files that cannot be read, for structures without
/// energy and forces, and if the settings ask for what no structure has: a key of their own,
/// stress.
OwnStructures read_structures(const Settings& settings);

/// How many of `frames` have an energy, forces and stress: "energies of 20, forces of 12".
std::string labels_text(const std::vector<XyzFrame>& frames);

/// Species of `judged` that `training` has not, with commas between them.
std::string unseen_species(const OwnStructures& all);

/// One of them with its neighbours; `energy`, `forces` and `stress` are undefined where the file
/// has none. The energy is without that of lone atoms.
Structure structure_of(const XyzFrame& frame, const OwnStructures& all, double cutoff);

}  // namespace tessera::workloads::gnn
