#include "doctor/machine.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/cores.h"
#include "tessera/planner/machine_profile.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The value after `key` and a colon in a file of such lines; empty if there is none.
std::string value_of(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!line.starts_with(key)) continue;
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::uint64_t meminfo(const std::string& key) {
  return std::strtoull(value_of("/proc/meminfo", key + ":").c_str(), nullptr, 10);
}

// The word in brackets, as in `always [madvise] never`.
std::string chosen_word(const std::string& line) {
  const std::size_t begin = line.find('[');
  const std::size_t end = line.find(']');
  return begin == std::string::npos || end == std::string::npos
             ? ""
             : line.substr(begin + 1, end - begin - 1);
}

std::optional<std::uint64_t> read_cgroup_memory(std::uint64_t total) {
  std::optional<std::uint64_t> smallest;
  for (const fs::path& folder : core::control_groups("memory")) {
    std::string text = first_line(folder / "memory.max");
    if (text.empty()) text = first_line(folder / "memory.limit_in_bytes");
    const std::uint64_t limit = std::strtoull(text.c_str(), nullptr, 10);
    // "max", and the huge number that stands for it in older kernels.
    if (limit == 0 || limit >= total) continue;
    smallest = std::min(smallest.value_or(limit), limit);
  }
  return smallest;
}

std::optional<std::uint64_t> soft_limit(decltype(RLIMIT_NOFILE) resource) {
  rlimit limit{};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

std::vector<std::string> read_gpus() {
  std::vector<std::string> models;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc/driver/nvidia/gpus", ignored)) {
    const std::string model = value_of(entry.path() / "information", "Model:");
    models.push_back(model.empty() ? "NVIDIA GPU" : model);
  }
  std::sort(models.begin(), models.end());
  return models;
}

std::vector<NetworkInterface> read_interfaces() {
  std::vector<NetworkInterface> found;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const std::string name = entry->ifa_name;
    auto place = std::find_if(found.begin(), found.end(),
                              [&](const NetworkInterface& one) { return one.name == name; });
    // IPv4 addresses come first in the list.
    if (place != found.end()) continue;
    char text[INET6_ADDRSTRLEN] = "";
    const void* address =
        family == AF_INET
            ? static_cast<const void*>(&reinterpret_cast<sockaddr_in*>(entry->ifa_addr)->sin_addr)
            : &reinterpret_cast<sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
    inet_ntop(family, address, text, sizeof(text));
    found.push_back({name, text, (entry->ifa_flags & IFF_UP) != 0});
  }
  freeifaddrs(list);
  return found;
}

void read_shm(Machine& machine) {
  const char* named = std::getenv("TESSERA_SHM_DIR");
  if (named == nullptr || *named == '\0') {
    // Segments are anonymous memory, of which groups take half at most.
    machine.has_shm_directory = true;
    machine.shm_total = std::min(machine.memory_total, machine.cgroup_memory.value_or(UINT64_MAX));
    machine.shm_free = std::min(machine.memory_available, machine.shm_total) / 2;
    return;
  }
  machine.shm_directory = named;
  struct statvfs info{};
  if (statvfs(machine.shm_directory.c_str(), &info) != 0) return;
  machine.has_shm_directory = access(machine.shm_directory.c_str(), W_OK) == 0;
  machine.shm_total = static_cast<std::uint64_t>(info.f_blocks) * info.f_frsize;
  machine.shm_free = static_cast<std::uint64_t>(info.f_bavail) * info.f_frsize;
}

}  // namespace

void share_cores(int num_ranks) {
  const int share = std::max(1, core::cores_left() / num_ranks);
  setenv("OMP_NUM_THREADS", std::to_string(share).c_str(), /*overwrite=*/0);
}

Machine read_machine() {
  Machine machine;
  utsname system{};
  if (uname(&system) == 0) machine.kernel = std::string(system.sysname) + " " + system.release;
  machine.processor = planner::processor_name();
  machine.online_cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  machine.usable_cores = core::cores_in_mask();
  machine.cgroup_cores = core::cores_of_control_group();
  machine.cores_left = core::cores_left();
  machine.memory_total = meminfo("MemTotal") * 1024;
  machine.memory_available = meminfo("MemAvailable") * 1024;
  machine.cgroup_memory = read_cgroup_memory(machine.memory_total);
  machine.transparent_huge_pages =
      chosen_word(first_line("/sys/kernel/mm/transparent_hugepage/enabled"));
  machine.reserved_huge_pages = meminfo("HugePages_Total");
  read_shm(machine);
  machine.open_files = soft_limit(RLIMIT_NOFILE);
  machine.processes = soft_limit(RLIMIT_NPROC);
  machine.locked_memory = soft_limit(RLIMIT_MEMLOCK);
  machine.load = std::atof(first_line("/proc/loadavg").c_str());
  machine.gpus = read_gpus();
  machine.interfaces = read_interfaces();
  return machine;
}

}  // namespace tessera::cli
