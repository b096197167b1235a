// gnn/extended_xyz.h — structures of atoms as text files hold them. No LibTorch.
//
// Extended XYZ, as ASE, QUIP and others write it: a line with the number of atoms, a line of
// key=value pairs (Lattice, Properties, pbc, energy, stress or virial), a line per atom. A file may
// hold any number of structures, one after the other.

#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::workloads::gnn {

struct XyzFrame {
  std::vector<std::string> species;                // per atom
  std::vector<double> positions;                   // [atoms, 3]
  std::optional<std::array<double, 9>> cell = {};  // lattice vectors as rows
  std::array<bool, 3> is_periodic{false, false, false};
  std::optional<double> energy = {};
  std::vector<double> forces = {};                   // [atoms, 3], or none
  std::optional<std::array<double, 9>> stress = {};  // energy per volume; of a virial, minus that
                                                     // over the volume
  std::int64_t num_atoms() const { return static_cast<std::int64_t>(species.size()); }
};

/// Names under which a file keeps what is to be learned.
struct XyzKeys {
  std::string energy = "energy";
  std::string forces = "forces";
  std::string stress = "stress";
};

/// All structures of a file, in order. Throws DataError, naming file and line, for what is not such
/// a file, has numbers that are not finite, or no atoms.
std::vector<XyzFrame> read_extended_xyz(const std::string& path, const XyzKeys& keys = {});

/// A structure as such a file holds it, under the usual names; numbers read back as they are.
std::string extended_xyz(const XyzFrame& frame);

}  // namespace tessera::workloads::gnn
