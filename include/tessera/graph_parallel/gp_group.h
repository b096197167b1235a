// tessera/graph_parallel/gp_group.h — the graph-parallel and the data-parallel group of a rank,
// under the names of ocpmodels.common.gp_utils.
//
// The ranks form a grid: a row of consecutive ranks splits one graph (axis "graph"), a column sees
// different graphs (axis "data"). The getters read the thread's current mesh, which setup_gp sets,
// and which a program may set itself with comm::CurrentMesh. See docs/deviations.md for what
// differs.

#pragma once

#include <cstdint>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::graph_parallel {

/// Throws ValueError unless `b` divides `a`.
TESSERA_API void ensure_div(std::int64_t a, std::int64_t b);
/// Returns `a / b`. Throws ValueError if there is a remainder.
TESSERA_API std::int64_t divide_and_check_no_remainder(std::int64_t a, std::int64_t b);

struct GpConfig {
  /// Ranks per graph; more than there are ranks means all of them.
  int gp_gpus = 1;
  /// Kept for the reference's configuration; the groups use the engine of the world they are cut
  /// from.
  std::string distributed_backend;
};

/// Makes this thread's graph-parallel and data-parallel groups out of `world`.
///
/// Collective over `world`. Throws ValueError naming both numbers if the group size does not divide
/// the world's, and if the groups are there already; comm::Error, the same on all ranks, if the
/// ranks ask for different sizes.
TESSERA_API void setup_gp(const GpConfig& config, const comm::Group& world);

/// Forgets the groups; setup_gp may then be called again. Not collective. Does nothing without
/// them.
TESSERA_API void cleanup_gp() noexcept;

/// Whether this thread has a graph-parallel group.
TESSERA_API bool initialized() noexcept;

/// The groups, or null before setup. Valid until cleanup_gp.
TESSERA_API const comm::Group* get_dp_group() noexcept;
TESSERA_API const comm::Group* get_gp_group() noexcept;

/// This rank's place in the groups and their sizes: 0 and 1 before setup.
TESSERA_API int get_dp_rank() noexcept;
TESSERA_API int get_gp_rank() noexcept;
TESSERA_API int get_dp_world_size() noexcept;
TESSERA_API int get_gp_world_size() noexcept;

namespace detail {
/// What setup_gp checks before it makes groups, for bindings that make their own: returns the size
/// of the graph-parallel groups. `backend`: any number that stands for it. Collective; throws as
/// setup_gp.
TESSERA_API int agree_on_setup(int gp_gpus, bool is_set_up, std::int64_t backend,
                               const comm::Group& world);
}  // namespace detail

}  // namespace tessera::graph_parallel
