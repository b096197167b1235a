// tessera/comm/mesh.h — one arrangement of all ranks, with a name for each direction.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::comm {

struct Axis {
  std::string name;
  int size = 1;
};

/// The ranks of a group as an array with named axes, row-major: the last axis is the fastest.
///
/// With axes {"data", 2}, {"vocab", 4}, rank 5 sits at data 1, vocab 1; its "vocab" group is ranks
/// 4, 5, 6, 7 and its "data" group ranks 1, 5. Immutable; copies are cheap.
class TESSERA_API Mesh {
 public:
  /// Collective over `world`. Sub-groups are made in the same order on every rank: axis by axis.
  /// Throws ValueError when the axes do not multiply to the size of `world`, when a name is empty
  /// or repeated, and Error(kMismatch), on all ranks, when ranks ask for different meshes.
  Mesh(const Group& world, std::vector<Axis> axes);

  /// The checks of the constructor, for whoever makes the sub-groups another way. Collective.
  static void check(const Group& world, const std::vector<Axis>& axes);

  const Group& world() const noexcept;
  const std::vector<Axis>& axes() const noexcept;

  /// The group of ranks that differ from this one in `axis` only. Not collective.
  /// Throws ValueError naming the axes there are.
  const Group& group(const std::string& axis) const;

  /// This rank's place along `axis`.
  int coordinate(const std::string& axis) const;
  int size(const std::string& axis) const;

  /// The group of ranks that differ from this one in the given axes only, in mesh order. Collective
  /// over the world; the order of `axes` does not matter.
  Group flatten(const std::vector<std::string>& axes) const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

/// Makes `mesh` the current mesh of this thread until the scope ends; the reference's process-wide
/// getters read it. Thread-local, so that ranks may be threads.
class TESSERA_API CurrentMesh {
 public:
  explicit CurrentMesh(Mesh mesh);
  ~CurrentMesh();
  CurrentMesh(const CurrentMesh&) = delete;
  CurrentMesh& operator=(const CurrentMesh&) = delete;

  /// The innermost one of this thread, or null.
  static const Mesh* get() noexcept;

 private:
  Mesh mesh_;
  CurrentMesh* outer_;
};

}  // namespace tessera::comm
