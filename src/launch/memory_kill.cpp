#include "memory_kill.h"

#include <fstream>
#include <string>

namespace tessera::launch {
namespace {

// Finds `key value` in a file of such lines; -1 if there is none.
int64_t value_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  int64_t value = 0;
  while (file >> name >> value) {
    if (name == key) return value;
  }
  return -1;
}

}  // namespace

int64_t num_memory_kills() {
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    // hierarchy:controllers:path
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    int64_t count = -1;
    if (controllers.empty()) {
      count = value_in("/sys/fs/cgroup" + path + "/memory.events", "oom_kill");
    } else if (controllers.find("memory") != std::string::npos) {
      count = value_in("/sys/fs/cgroup/memory" + path + "/memory.oom_control", "oom_kill");
    }
    if (count >= 0) return count;
  }
  return value_in("/proc/vmstat", "oom_kill");
}

}  // namespace tessera::launch
