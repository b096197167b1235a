// src/sharding/subgroups.h — groups of some ranks of a group, made once and shared by modules.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/group.h"

namespace tessera::sharding {

/// The group of `ranks` (ascending) of `group`; none on other ranks. The first call with these
/// ranks makes it and is collective over them; later calls of the thread return the same one.
std::optional<comm::Group> shared_subgroup(const comm::Group& group, const std::vector<int>& ranks);

/// The ranks of this host, and those with this local rank on all hosts: group rank r is on host
/// r / local_size.
struct HostGroups {
  HostGroups(const comm::Group& group, int local_size);

  comm::Group intra;
  comm::Group cross;
};

}  // namespace tessera::sharding
