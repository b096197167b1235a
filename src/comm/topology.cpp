#include "tessera/comm/topology.h"

#include <map>

#include "tessera/comm/environment.h"
#include "tessera/core/check.h"

namespace tessera::comm {

int get_local_size(std::optional<int> world_size) {
  const Environment environment = read_environment();
  const int world = world_size.value_or(environment.world_size);
  TESSERA_CHECK_VALUE(world >= 1, "comm.get_local_size: a world has at least one rank, not ", world,
                      ".");
  const int local = environment.local_world_size;
  return world % local == 0 && environment.launcher != "none" ? local : world;
}

int get_local_rank(std::optional<int> world_size, std::optional<int> rank) {
  if (rank) return *rank % get_local_size(world_size);
  return read_environment().local_rank;
}

int get_group_rank(std::optional<int> world_size, std::optional<int> rank) {
  return rank.value_or(read_environment().rank) / get_local_size(world_size);
}

int get_num_groups(std::optional<int> world_size) {
  const int world = world_size.value_or(read_environment().world_size);
  return world / get_local_size(world);
}

std::pair<Group, Group> intra_and_cross_node_pg(const Group& world) {
  // Kept for the life of the thread, like the world group itself; ranks may be threads.
  thread_local std::map<c10d::ProcessGroup*, std::pair<Group, Group>> made;
  const auto key = world.process_group().get();
  const auto known = made.find(key);
  if (known != made.end()) return known->second;

  const int local_size = get_local_size(world.size());
  const int num_hosts = world.size() / local_size;
  const int host = world.rank() / local_size;
  const int local_rank = world.rank() % local_size;
  std::vector<int> intra;
  for (int r = 0; r < local_size; ++r) intra.push_back(host * local_size + r);
  std::vector<int> cross;
  for (int h = 0; h < num_hosts; ++h) cross.push_back(h * local_size + local_rank);
  const auto intra_group = world.subgroup(intra, "intra_node");
  const auto cross_group = world.subgroup(cross, "cross_node");
  return made.emplace(key, std::pair(*intra_group, *cross_group)).first->second;
}

}  // namespace tessera::comm
