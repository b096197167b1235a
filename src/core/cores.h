// src/core/cores.h — how many cores this process may use. No LibTorch.

#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::core {

/// Numbers of the cores that the affinity mask of the calling thread leaves, in order.
std::vector<int> mask();

/// How many these are.
int cores_in_mask();

/// The folders of this process's control group and of all above it, innermost first.
std::vector<std::filesystem::path> control_groups(const std::string& controller);

/// Cores whose time the control groups leave; nothing where they set no limit.
std::optional<double> cores_of_control_group();

/// How many threads may compute at once: what mask and control groups leave, at least one. Reads
/// small files, so not in every step.
int cores_left();

/// The same for one of several processes of a host, at least one: the cores of its mask are shared
/// with those whose masks overlap it, what the control groups leave (`of_group`) with all.
int share_of_cores(const std::vector<std::vector<int>>& masks, std::size_t self,
                   std::optional<double> of_group);

}  // namespace tessera::core
