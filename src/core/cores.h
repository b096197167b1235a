// src/core/cores.h — how many cores this process may use. No LibTorch.

#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace tessera::core {

/// Cores that the affinity mask of the calling thread leaves.
int cores_in_mask();

/// The folders of this process's control group and of all above it, innermost first.
std::vector<std::filesystem::path> control_groups(const std::string& controller);

/// Cores whose time the control groups leave; nothing where they set no limit.
std::optional<double> cores_of_control_group();

/// How many threads may compute at once: what mask and control groups leave, at least one. Reads
/// small files, so not in every step.
int cores_left();

}  // namespace tessera::core
