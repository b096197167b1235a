#include "sharding/subgroups.h"

#include <algorithm>
#include <map>
#include <utility>

namespace tessera::sharding {
namespace {

std::vector<int> ranks_of(int first, int step, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

}  // namespace

std::optional<comm::Group> shared_subgroup(const comm::Group& group,
                                           const std::vector<int>& ranks) {
  if (std::find(ranks.begin(), ranks.end(), group.rank()) == ranks.end()) return std::nullopt;
  if (static_cast<int>(ranks.size()) == group.size()) return group;
  // Kept for the life of the thread, with the group they are parts of; ranks may be threads.
  using Key = std::pair<c10d::ProcessGroup*, std::vector<int>>;
  thread_local std::map<Key, std::pair<comm::Group, comm::Group>> made;
  const Key key(group.process_group().get(), ranks);
  const auto known = made.find(key);
  if (known != made.end()) return known->second.second;
  comm::Group part = *group.subgroup(ranks, group.name() + ".tables");
  made.emplace(key, std::pair(group, part));
  return part;
}

HostGroups::HostGroups(const comm::Group& group, int local_size)
    : intra(
          *shared_subgroup(group, ranks_of(group.rank() / local_size * local_size, 1, local_size))),
      cross(*shared_subgroup(
          group, ranks_of(group.rank() % local_size, local_size, group.size() / local_size))) {}

}  // namespace tessera::sharding
