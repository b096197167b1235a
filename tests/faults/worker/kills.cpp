// Ranks that are killed, one in each of many short jobs. What the survivors say of it goes to
// standard output, one line of JSON a kill; counts.py adds it up.

#include <unistd.h>

#include <cstdio>
#include <numeric>
#include <set>
#include <stdexcept>
#include <thread>

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

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Tells when this rank's record is on the store: from then on others can say who has died. It is a
// look from beside, since init returns only once all have met.
void watch_arrival() {
  std::thread([] {
    await_on_store("tessera/" + variable("TORCHELASTIC_RUN_ID") + "/0/generation/0/member/" +
                   variable("RANK"));
    tell("arrived");
  }).detach();
}

// The first group, which no other precedes: killed while it is made, or in the first operations.
[[noreturn]] void meet(std::chrono::milliseconds delay) {
  std::this_thread::sleep_for(delay);
  watch_arrival();
  tell("begins");
  const Group world = comm::init();
  at::Tensor tensor = at::zeros({1000}, at::kFloat);
  while (true) comm::all_reduce_(tensor, world);
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
  const bool is_meeting = phase == "meeting";
  if (!is_meeting && phase != "collective" && phase != "creation" && phase != "teardown") {
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
    // In every other meeting one rank comes late, so that the others wait for it in the middle.
    const int late = dice() % 2 == 0 ? (victim + 1) % size : -1;
    const std::chrono::milliseconds delay(dice() % 400);
    ShortJob job = jobs.start(size, [&] {
      const int rank = std::atoi(std::getenv("RANK"));
      if (refuses) refuse_pidfds();
      if (is_meeting) meet(rank == late ? delay : std::chrono::milliseconds(0));
      live(phase, is_large, has_child, rank == victim, count);
      return 0;
    });
    std::vector<int> everybody(static_cast<std::size_t>(size));
    std::iota(everybody.begin(), everybody.end(), 0);
    std::vector<int> survivors = everybody;
    std::erase(survivors, victim);
    const std::vector<Json> ready = is_meeting ? job.await("arrived", {victim}, kPatience)
                                               : job.await("warm", everybody, kPatience);
    for (const Json& each : ready) {
      if (each.is_null()) throw std::runtime_error("a rank did not come to its loop");
    }
    const pid_t victim_pid = job.pid(victim);
    ::usleep(static_cast<useconds_t>(dice() % (is_meeting && late >= 0 ? 400'000 : 20'000)));
    const std::int64_t killed = job.kill(victim);
    Json line{{"victim", victim}, {"pid", victim_pid}, {"texts", Json::array()}};
    double latest = 0;
    bool is_named = true;
    const std::string who =
        "rank " + std::to_string(victim) + " (pid " + std::to_string(victim_pid) + ",";
    const std::vector<Json> errors = job.await("error", survivors, kPatience);
    const std::vector<Json> begins = job.await("begins", survivors, std::chrono::milliseconds(0));
    for (std::size_t s = 0; s < survivors.size(); ++s) {
      const Json& error = errors[s];
      if (error.is_null()) {
        line["texts"].push_back("nothing");
        is_named = false;
        continue;
      }
      const auto text = error["text"].get<std::string>();
      line["texts"].push_back(text);
      is_named = is_named && error["kind"] == "peer lost" && text.find(who) != std::string::npos;
      // Who comes after the death learns of it then.
      const std::int64_t since =
          begins[s].is_null() ? killed : std::max(killed, begins[s]["ns"].get<std::int64_t>());
      latest = std::max(latest, static_cast<double>(error["ns"].get<std::int64_t>() - since) / 1e6);
    }
    line["engine"] = is_meeting ? Json(variable("TESSERA_ENGINE")) : ready[0]["engine"];
    line["ms"] = latest;
    line["named"] = is_named;
    std::printf("%s\n", line.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace tessera::faults
