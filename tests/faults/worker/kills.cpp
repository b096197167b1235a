// Ranks that are killed, one in each of many short jobs. What the survivors say of it goes to
// standard output, one line of JSON a kill; counts.py adds it up.

#include <unistd.h>

#include <cstdio>
#include <numeric>
#include <set>
#include <stdexcept>

#include <ATen/ATen.h>

#include "modes.h"
#include "short_jobs.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/group.h"

namespace tessera::faults {
namespace {

using comm::Group;

constexpr std::chrono::seconds kPatience{30};

std::vector<int> all_ranks(const Group& group) {
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// A child that outlives its rank, as the workers of a loader do for a while.
void leave_child() {
  if (::fork() != 0) return;
  ::alarm(5);
  ::pause();
  ::_exit(0);
}

// Never returns: the rank is killed, or learns that another was.
[[noreturn]] void live(const std::string& phase, bool is_large, bool has_child, bool is_victim,
                       std::int64_t count) {
  const Group world = comm::init();
  if (has_child) leave_child();
  if (is_large && is_victim) take_memory(1024);
  at::Tensor tensor = at::zeros({count}, at::kFloat);
  const std::vector<int> all = all_ranks(world);
  for (int i = 0;; ++i) {
    if (i == 3) tell("warm", {{"engine", world.engine()}});
    if (phase == "collective") {
      comm::all_reduce_(tensor, world);
    } else if (phase == "creation") {
      world.subgroup(all, "group " + std::to_string(i));
    } else {
      // Mostly in the middle of being taken down.
      auto group = world.subgroup(all, "group " + std::to_string(i));
      comm::all_reduce_(tensor, *group);
      group.reset();
    }
  }
}

}  // namespace

int run_kills(const Options& options) {
  const std::string phase = options.text("phase", "collective");
  if (phase != "collective" && phase != "creation" && phase != "teardown") {
    throw std::invalid_argument("no phase " + phase);
  }
  const int size = static_cast<int>(options.number("ranks", 3));
  const bool is_large = options.number("large", 0) != 0;
  const bool has_child = options.number("children", 0) != 0;
  const bool refuses = options.text("pidfds") == "refused";
  std::mt19937_64 dice(static_cast<std::uint64_t>(options.number("seed", 1)));
  ShortJobs jobs;
  for (long i = 0; i < options.number("count", 10); ++i) {
    const int victim = static_cast<int>(dice() % static_cast<std::uint64_t>(size));
    const std::int64_t count = dice() % 2 == 0 ? 1000 : 1'000'000;
    ShortJob job = jobs.start(size, [&] {
      if (refuses) refuse_pidfds();
      live(phase, is_large, has_child, std::atoi(std::getenv("RANK")) == victim, count);
      return 0;
    });
    std::vector<int> everybody(static_cast<std::size_t>(size));
    std::iota(everybody.begin(), everybody.end(), 0);
    std::vector<int> survivors = everybody;
    std::erase(survivors, victim);
    const std::vector<Json> warm = job.await("warm", everybody, kPatience);
    for (const Json& each : warm) {
      if (each.is_null()) throw std::runtime_error("a rank did not come to its loop");
    }
    const pid_t victim_pid = job.pid(victim);
    ::usleep(static_cast<useconds_t>(dice() % 20'000));
    const std::int64_t killed = job.kill(victim);
    Json line{{"victim", victim}, {"pid", victim_pid}, {"texts", Json::array()}};
    double latest = 0;
    bool is_named = true;
    const std::string who =
        "rank " + std::to_string(victim) + " (pid " + std::to_string(victim_pid) + ",";
    for (const Json& error : job.await("error", survivors, kPatience)) {
      if (error.is_null()) {
        line["texts"].push_back("nothing");
        is_named = false;
        continue;
      }
      const auto text = error["text"].get<std::string>();
      line["texts"].push_back(text);
      is_named = is_named && error["kind"] == "peer lost" && text.find(who) != std::string::npos;
      latest =
          std::max(latest, static_cast<double>(error["ns"].get<std::int64_t>() - killed) / 1e6);
    }
    line["engine"] = warm[0]["engine"];
    line["ms"] = latest;
    line["named"] = is_named;
    std::printf("%s\n", line.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace tessera::faults
