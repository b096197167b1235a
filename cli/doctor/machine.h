// cli/doctor/machine.h — what the operating system says about this machine and this process.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

struct NetworkInterface {
  std::string name;
  std::string address;  // IPv4, or IPv6 if it has no other
  bool is_up = false;
};

/// Facts that need no measurement. Sizes are bytes; an empty optional means no limit.
struct Machine {
  std::string kernel;
  std::string processor;
  int online_cores = 0;
  int usable_cores = 0;                // what the affinity mask leaves
  std::optional<double> cgroup_cores;  // what the control group leaves
  int cores_left = 1;                  // what both leave
  std::uint64_t memory_total = 0;
  std::uint64_t memory_available = 0;
  std::optional<std::uint64_t> cgroup_memory;
  std::string transparent_huge_pages;  // always, madvise, never, or empty
  std::uint64_t reserved_huge_pages = 0;
  std::string shm_directory;  // empty: anonymous memory
  bool has_shm_directory = false;
  std::uint64_t shm_total = 0;
  std::uint64_t shm_free = 0;
  std::optional<std::uint64_t> open_files;  // soft limits of this process
  std::optional<std::uint64_t> processes;
  std::optional<std::uint64_t> locked_memory;
  double load = 0.0;              // of the last minute
  std::vector<std::string> gpus;  // models, as the NVIDIA driver names them
  std::vector<NetworkInterface> interfaces;
};

Machine read_machine();

/// Sets OMP_NUM_THREADS for the ranks that are started from here, so that they share these cores;
/// what the user says with it counts.
void share_cores(int num_ranks);

}  // namespace tessera::cli
