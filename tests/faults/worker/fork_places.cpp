// Two ranks work while threads of theirs fork children at any moment. Nothing a child does may be
// seen by the ranks: every result is known beforehand.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>

#include "modes.h"
#include "short_jobs.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/group.h"

namespace tessera::faults {
namespace {

using comm::Group;

constexpr unsigned kChildSeconds = 20;

// What one child does; it ends here, in one of the ways a child may end.
[[noreturn]] void be_child(std::uint64_t way, const Group& world) {
  ::alarm(kChildSeconds);  // a child that waits for what only its parent has is seen by its signal
  const auto is_refused = [&](const auto& run) {
    try {
      run();
      return false;
    } catch (const std::exception& error) {
      return std::string(error.what()).find("belongs to process") != std::string::npos;
    }
  };
  switch (way % 6) {
    case 0:
      ::_exit(0);
    case 1: {
      at::Tensor wrong = at::full({64}, 1000.F);
      ::_exit(is_refused([&] { comm::all_reduce_(wrong, world); }) ? 0 : 1);
    }
    case 2: {
      at::Tensor wrong = at::full({64}, 1000.F);
      ::_exit(is_refused([&] { comm::all_reduce_async_(wrong, world).wait(); }) ? 0 : 1);
    }
    case 3:  // lets go of the group, as an interpreter does at its end
      std::make_unique<Group>(world).reset();
      const_cast<Group&>(world).~Group();
      ::_exit(0);
    case 4:
      comm::report_failure("a child's own business");
      world.abort("a child's own business");
      ::_exit(0);
    default:  // lives on for a while, holding copies of everything its parent had open
      ::usleep(20'000);
      ::_exit(0);
  }
}

struct Outcome {
  int num_forks = 0;
  int num_wrong_children = 0;
};

Outcome fork_at_any_moment(const Group& world, long count, std::uint64_t seed) {
  std::mt19937_64 dice(seed);
  Outcome outcome;
  for (; outcome.num_forks < count; ++outcome.num_forks) {
    ::usleep(static_cast<useconds_t>(dice() % 3000));
    const std::uint64_t way = dice();
    const pid_t child = ::fork();
    if (child == 0) be_child(way, world);
    int status = -1;
    ::waitpid(child, &status, 0);
    if (status != 0) {
      ++outcome.num_wrong_children;
      tell("wrong_child", {{"way", way % 6}, {"status", status}});
    }
  }
  return outcome;
}

// Returns how many results were not what they must be.
int work(const Group& world, const std::atomic<bool>& is_over) {
  std::vector<int> all(static_cast<std::size_t>(world.size()));
  std::iota(all.begin(), all.end(), 0);
  const float rank = static_cast<float>(world.rank());
  int num_wrong = 0;
  bool goes_on = true;
  for (int i = 0; goes_on; ++i) {
    at::Tensor small = at::full({64}, rank + 1);
    at::Tensor large = at::full({100'000}, rank + 1);
    auto pending = comm::all_reduce_async_(large, world);
    comm::all_reduce_(small, world);
    const at::Tensor gathered = comm::all_gather(at::full({3}, rank), world);
    pending.wait();
    num_wrong += at::all(small == 3).item<bool>() ? 0 : 1;
    num_wrong += at::all(large == 3).item<bool>() ? 0 : 1;
    num_wrong += at::all(gathered == at::arange(6).div(3, "floor")).item<bool>() ? 0 : 1;
    if (i % 8 == 0) {
      const auto group = world.subgroup(all, "group " + std::to_string(i));
      at::Tensor value = at::full({5}, rank + 1);
      comm::all_reduce_(value, *group);
      num_wrong += at::all(value == 3).item<bool>() ? 0 : 1;
    }
    // Both go on until both have forked enough.
    at::Tensor done = at::full({1}, is_over ? 1.F : 0.F);
    comm::all_reduce_(done, world);
    goes_on = done.item<float>() < static_cast<float>(world.size());
  }
  return num_wrong;
}

}  // namespace

int run_fork_places(const Options& options) {
  const long count = options.number("count", 20);
  const auto seed = static_cast<std::uint64_t>(options.number("seed", 1));
  const long hangs = options.number("hangs", -1);  // a rank that does not end: that this is seen
  const std::chrono::seconds end_limit(options.number("end_limit", 20));
  ShortJobs jobs;
  ShortJob job = jobs.start(2, [&] {
    const Group world = comm::init();
    // LibTorch makes some of its things when they are first used. A child forked meanwhile waits
    // for them for ever, whoever forks it.
    std::atomic<bool> is_over{true};
    work(world, is_over);
    is_over = false;
    Outcome outcome;
    std::thread forks([&] {
      outcome =
          fork_at_any_moment(world, count, seed * 2 + static_cast<std::uint64_t>(world.rank()));
      is_over = true;
    });
    int num_wrong = 1;
    try {
      num_wrong = work(world, is_over);
    } catch (const std::exception& error) {
      tell("error", {{"text", error.what()}});
    }
    forks.join();
    tell("forks", {{"forks", outcome.num_forks},
                   {"wrong_children", outcome.num_wrong_children},
                   {"wrong_results", num_wrong}});
    comm::barrier(world);
    while (world.rank() == hangs) ::pause();
    return 0;
  });
  Json line{
      {"forks", 0}, {"wrong_children", 0}, {"wrong_results", 0}, {"unheard", 0}, {"wrong_ends", 0}};
  for (const Json& said : job.await("forks", {0, 1}, std::chrono::seconds(30 + count))) {
    if (said.is_null()) {
      line["unheard"] = line["unheard"].get<int>() + 1;
      continue;
    }
    for (const char* key : {"forks", "wrong_children", "wrong_results"}) {
      line[key] = line[key].get<int>() + said[key].get<int>();
    }
  }
  for (const Json& child : job.await("wrong_child", {0, 1}, std::chrono::milliseconds(0))) {
    if (!child.is_null())
      line["wrong"].push_back({{"way", child["way"]}, {"status", child["status"]}});
  }
  // One that has not ended by then was killed, and has SIGKILL's.
  for (const int status : job.wait(end_limit)) {
    line["statuses"].push_back(status);
    if (status != 0) line["wrong_ends"] = line["wrong_ends"].get<int>() + 1;
  }
  std::printf("%s\n", line.dump().c_str());
  const bool is_good = line["wrong_children"] == 0 && line["wrong_results"] == 0 &&
                       line["unheard"] == 0 && line["wrong_ends"] == 0;
  return is_good ? 0 : 1;
}

}  // namespace tessera::faults
