#include "core/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <sstream>

namespace tessera::core {
namespace {

namespace fs = std::filesystem;

std::string first_line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

std::vector<int> mask() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  // Fails on machines with more cores than the set has room for; they are not short of cores.
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set) != 0) cores.push_back(core);
    }
  } else {
    cores.resize(static_cast<std::size_t>(::sysconf(_SC_NPROCESSORS_ONLN)));
    std::iota(cores.begin(), cores.end(), 0);
  }
  return cores;
}

int cores_in_mask() { return static_cast<int>(mask().size()); }

std::vector<fs::path> control_groups(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = line.substr(first + 1, second - first - 1);
    const bool is_unified = names.empty();
    if (!is_unified && ("," + names + ",").find("," + controller + ",") == std::string::npos) {
      continue;
    }
    const fs::path root = is_unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
    std::vector<fs::path> folders;
    fs::path inner = fs::path(line.substr(second + 1)).relative_path();
    for (; !inner.empty(); inner = inner.parent_path()) folders.push_back(root / inner);
    folders.push_back(root);
    return folders;
  }
  return {};
}

std::optional<double> cores_of_control_group() {
  std::optional<double> smallest;
  for (const fs::path& folder : control_groups("cpu")) {
    double quota = -1;
    double period = 0;
    // "max 100000" has no number first.
    std::istringstream unified(first_line_of(folder / "cpu.max"));
    if (!(unified >> quota >> period)) {
      quota = std::atof(first_line_of(folder / "cpu.cfs_quota_us").c_str());
      period = std::atof(first_line_of(folder / "cpu.cfs_period_us").c_str());
    }
    if (quota <= 0 || period <= 0) continue;
    smallest = std::min(smallest.value_or(quota / period), quota / period);
  }
  return smallest;
}

int cores_left() {
  const int in_mask = cores_in_mask();
  const auto allowed = static_cast<int>(cores_of_control_group().value_or(in_mask));
  return std::max(1, std::min(in_mask, allowed));
}

int share_of_cores(const std::vector<std::vector<int>>& masks, std::size_t self,
                   std::optional<double> of_group) {
  const std::vector<int>& own = masks[self];
  const auto overlaps = [&](const std::vector<int>& other) {
    return std::find_first_of(own.begin(), own.end(), other.begin(), other.end()) != own.end();
  };
  const auto sharing = std::max<std::ptrdiff_t>(1, std::ranges::count_if(masks, overlaps));
  auto share = static_cast<double>(own.size()) / static_cast<double>(sharing);
  if (of_group) share = std::min(share, *of_group / static_cast<double>(masks.size()));
  return std::max(1, static_cast<int>(share));
}

}  // namespace tessera::core
