#include "doctor/profile.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "doctor/machine.h"
#include "launch/store_host.h"
#include "programs/captured_program.h"
#include "report/run_folder.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/planner/plan_error.h"

namespace tessera::cli {
namespace {

using launch::LaunchError;

// It is to take 20 s at most: the ranks are told when to end, such that they still can.
constexpr std::chrono::seconds kMeasuring{16};
constexpr std::chrono::seconds kLimit{60};  // if they do not
// Of several hosts, from when all ranks have met: as long, and then what lies between them.
constexpr char kMeasuringHosts[] = "+16";
constexpr int kExitFailed = 1;
constexpr double kMuch = 0.2;  // of spread

std::string text_of(const planner::MachineProfile& profile, const std::string& path) {
  const planner::Speeds speeds = planner::speeds_of(profile);
  const planner::Line dense = planner::fit(profile.dense);
  const planner::Line host = planner::fit(profile.host);
  const planner::Line network = planner::fit(profile.network);
  char text[1024];
  std::snprintf(text, sizeof text,
                "machine  %s, %d ranks of %d threads, engine %s\n"
                "rows     %.1f ns each and %.1f GB/s\n"
                "steps    %.1f ns an id and %.1f GB/s; %.1f us a part of a table\n"
                "links    %.1f us an exchange and %.2f GB/s in a host\n"
                "dense    %.1f Gflop/s a rank\n",
                profile.machine.c_str(), profile.num_ranks, profile.threads_per_rank,
                profile.engine.c_str(), speeds.row_seconds * 1e9, speeds.memory / 1e9,
                speeds.id_seconds * 1e9, speeds.step / 1e9, speeds.part_seconds * 1e6,
                host.fixed * 1e6, profile.host.empty() ? 0.0 : speeds.host / 1e9,
                dense.each > 0 ? 1e-9 / dense.each : 0.0);
  std::string all = text;
  if (!profile.network.empty()) {
    std::snprintf(text, sizeof text, "network  %.1f us an exchange and %.2f GB/s between hosts\n",
                  network.fixed * 1e6, speeds.network / 1e9);
    all += text;
  }
  std::string assumed;
  for (const std::string& words : planner::assumed(profile)) {
    assumed += (assumed.empty() ? "assumed  " : ", ") + words;
  }
  if (!assumed.empty()) all += assumed + "\n";
  if (profile.spread > kMuch) {
    std::snprintf(text, sizeof text,
                  "WARN     times of one thing differ by up to %.0f %%: measure again on a machine "
                  "that is idle\n",
                  100 * profile.spread);
    all += text;
  }
  if (profile.left_out > 0) {
    std::snprintf(text, sizeof text,
                  "WARN     %d things were not measured, since the time was up: measure again on a "
                  "machine that is idle\n",
                  profile.left_out);
    all += text;
  }
  return all + "profile  " + path + "\n";
}

}  // namespace

int run_profile(const ProfileWords& words) {
  const auto end = std::chrono::steady_clock::now() + kMeasuring;
  const std::string path = words.out.empty() ? planner::profile_path() : words.out;
  if (path.empty()) {
    throw LaunchError(launch::kExitConfiguration, "doctor: there is no folder to keep a profile in",
                      "neither HOME nor XDG_CACHE_HOME is set", "--out FILE");
  }
  const std::string worker = launch::find_worker_program();
  if (worker.empty()) {
    throw LaunchError(kExitFailed, "doctor: there is no tessera-worker program beside tessera",
                      "the ranks that measure are started with it",
                      "install both, or set TESSERA_WORKER to its path");
  }
  const Machine machine = read_machine();
  const int num_ranks =
      words.num_ranks > 0 ? words.num_ranks : std::clamp(machine.cores_left, 1, 8);
  std::error_code failure;
  const std::string launcher = std::filesystem::read_symlink("/proc/self/exe", failure).string();
  std::vector<std::string> command = {launcher, "run", "-n", std::to_string(num_ranks),
                                      "--no-prefix"};
  command.insert(command.end(), words.hosts.begin(), words.hosts.end());
  const std::chrono::duration<double> until = end.time_since_epoch();
  command.insert(command.end(),
                 {"--", worker, "profile-rank",
                  words.hosts.empty() ? std::to_string(until.count()) : kMeasuringHosts});
  if (words.is_quick) command.emplace_back("--quick");
  const Outcome outcome = run_program(command, kLimit + words.meeting);
  const auto failed = [&](const std::string& why) {
    return LaunchError(kExitFailed, "doctor: the ranks that measure gave no answer", why,
                       "tessera doctor, which checks two ranks");
  };
  if (outcome.timed_out) throw failed("they did not end within 60 s");
  if (outcome.status != 0) {
    throw failed(outcome.err.substr(0, std::min(outcome.err.find('\n'), outcome.err.size())));
  }
  planner::MachineProfile profile;
  try {
    profile = planner::profile_from_json(outcome.out);
  } catch (const planner::PlanError& error) {
    throw failed(error.problem());
  }
  profile.machine = machine.processor;
  const std::string text = planner::to_json(profile) + "\n";
  try {
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    if (!folder.empty()) std::filesystem::create_directories(folder, failure);
    workloads::report::write_text(path, text);
  } catch (const workloads::report::Error& error) {
    throw LaunchError(launch::kExitData, std::string("doctor: ") + error.what(),
                      "the profile cannot be kept there", "--out FILE");
  }
  std::fputs(words.as_json ? text.c_str() : text_of(profile, path).c_str(), stdout);
  return launch::kExitOk;
}

}  // namespace tessera::cli
