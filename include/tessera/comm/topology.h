// tessera/comm/topology.h — ranks and hosts, under the names the embedding modules know.

#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::comm {

/// Processes of this job on this host: LOCAL_WORLD_SIZE (or the scheduler's word for it) if it
/// divides `world_size` (default: WORLD_SIZE), else `world_size` itself. Never collective, like all
/// below.
TESSERA_API int get_local_size(std::optional<int> world_size = std::nullopt);

/// This process's number on its host: LOCAL_RANK if set, else `rank` modulo the local size. With
/// `world_size` and `rank` given, computed from them.
TESSERA_API int get_local_rank(std::optional<int> world_size = std::nullopt,
                               std::optional<int> rank = std::nullopt);

/// Number of this process's host: `rank` divided by the local size.
TESSERA_API int get_group_rank(std::optional<int> world_size = std::nullopt,
                               std::optional<int> rank = std::nullopt);

/// Number of hosts.
TESSERA_API int get_num_groups(std::optional<int> world_size = std::nullopt);

/// The group of this host's ranks, and the group of the ranks with this local rank on all hosts.
///
/// Collective over `world`; the first call makes them, later calls return the same ones. With one
/// host the second is a group of one.
TESSERA_API std::pair<Group, Group> intra_and_cross_node_pg(const Group& world);

}  // namespace tessera::comm
