#include <dirent.h>
#include <malloc.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

#include "modes.h"
#include "report.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/error.h"

namespace tessera::faults {
namespace {

using comm::Group;

int num_entries(const char* path) {
  DIR* folder = ::opendir(path);
  if (folder == nullptr) return -1;
  int count = 0;
  while (const dirent* entry = ::readdir(folder)) count += entry->d_name[0] != '.';
  ::closedir(folder);
  return count - 1;  // the folder itself is open while it is read; for threads it is a constant
}

// Private memory: pages of shared segments are counted by whoever touches them first.
long resident_kib() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("RssAnon:", 0) == 0) return std::atol(line.c_str() + 8);
  }
  return -1;
}

Json measure() {
  ::malloc_trim(0);
  return {{"kib", resident_kib()},
          {"descriptors", num_entries("/proc/self/fd")},
          {"threads", num_entries("/proc/self/task")}};
}

void create_and_destroy(const Group& world, int times) {
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  for (int i = 0; i < times; ++i) {
    const auto group = world.subgroup(all, "short-lived");
    at::Tensor tensor = at::zeros({100});
    comm::all_reduce_(tensor, *group);
    comm::all_reduce_async_(tensor, *group).wait();
    // Everybody is done before anybody destroys it.
    comm::barrier(*group);
  }
}

void run_steps(const Group& world, int times) {
  at::Tensor tensor = at::zeros({1000});
  for (int i = 0; i < times; ++i) {
    comm::all_reduce_(tensor, world);
    if (i % 10 == 0) comm::all_reduce_async_(tensor, world).wait();
    if (i % 100 == 0) comm::all_gather_v(tensor.narrow(0, 0, 1 + world.rank()), world);
  }
}

int free_port() {
  const int probe = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ::bind(probe, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  ::getsockname(probe, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(probe);
  return ntohs(address.sin_port);
}

constexpr int kExpectedCode = 7;

// Groups that are alive when the process ends, held in each way a program may hold them.
std::shared_ptr<Group> static_group;
std::vector<comm::Awaitable<at::Tensor>>* pending_forever = nullptr;

int end_with_live_groups(const std::string& variant) {
  const Group world = comm::init();
  std::vector<int> all;
  for (int r = 0; r < world.size(); ++r) all.push_back(r);
  static_group = world.subgroup(all, "static");
  auto* leaked = new Group(*world.subgroup(all, "leaked"));
  at::Tensor tensor = at::ones({1000});
  for (const Group* group : std::vector<const Group*>{&world, static_group.get(), leaked}) {
    comm::all_reduce_async_(tensor, *group).wait();
  }
  if (variant == "return") return kExpectedCode;
  if (variant == "exit") std::exit(kExpectedCode);
  if (variant == "pending") {
    // Rank 0's operations wait for peers that never come. Which rank ends first is left open.
    pending_forever = new std::vector<comm::Awaitable<at::Tensor>>;
    if (world.rank() == 0) {
      for (const Group* group : std::vector<const Group*>{&world, static_group.get(), leaked}) {
        for (int i = 0; i < 3; ++i) {
          pending_forever->push_back(comm::all_reduce_async(tensor, *group));
        }
      }
    }
    std::exit(kExpectedCode);
  }
  if (variant == "thread") {
    // Another thread waits inside a collective while main returns.
    if (world.rank() == 0) {
      std::thread([group = *leaked] {
        try {
          at::Tensor own = at::ones({1000});
          comm::all_reduce_(own, group);
        } catch (const comm::Error&) {
          // The peer has left: as it should be.
        }
      }).detach();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return kExpectedCode;
  }
  std::fprintf(stderr, "no variant %s\n", variant.c_str());
  return 2;
}

}  // namespace

int run_leaks(const Options& options) {
  const Group world = comm::init();
  report_ready(world);
  const int groups = static_cast<int>(options.number("groups", 200));
  const int steps = static_cast<int>(options.number("steps", 10000));
  create_and_destroy(world, 100);
  run_steps(world, steps / 5);
  comm::barrier(world);
  report("before", measure());
  create_and_destroy(world, groups);
  comm::barrier(world);
  report("after_groups", measure());
  run_steps(world, steps);
  comm::barrier(world);
  report("after_steps", measure());
  return 0;
}

int run_exit(const Options& options) { return end_with_live_groups(options.text("variant")); }

// Starting a program with LibTorch costs far more than what is tested here, so runs are copies of
// this process, made before it has threads. Each joins a job of its own and ends as its variant
// says.
int run_exits(const Options& options) {
  const int runs = static_cast<int>(options.number("runs", 50));
  const int size = static_cast<int>(options.number("size", 2));
  const std::string variant = options.text("variant");
  for (int run = 0; run < runs; ++run) {
    const std::string port = std::to_string(free_port());
    std::vector<pid_t> children;
    for (int rank = 0; rank < size; ++rank) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::setenv("RANK", std::to_string(rank).c_str(), 1);
        ::setenv("WORLD_SIZE", std::to_string(size).c_str(), 1);
        ::setenv("MASTER_ADDR", "127.0.0.1", 1);
        ::setenv("MASTER_PORT", port.c_str(), 1);
        ::alarm(30);
        return end_with_live_groups(variant);
      }
      children.push_back(child);
    }
    for (int rank = 0; rank < size; ++rank) {
      int status = 0;
      ::waitpid(children[rank], &status, 0);
      if (WIFEXITED(status) && WEXITSTATUS(status) == kExpectedCode) continue;
      report("bad_exit", {{"run", run},
                          {"rank", rank},
                          {"variant", variant},
                          {"signal", WIFSIGNALED(status) ? WTERMSIG(status) : 0},
                          {"code", WIFEXITED(status) ? WEXITSTATUS(status) : -1}});
    }
  }
  report("done", {{"runs", runs}});
  return 0;
}

}  // namespace tessera::faults
