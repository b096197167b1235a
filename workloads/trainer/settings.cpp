#include "trainer/settings.h"

#include <cstdio>
#include <filesystem>

#include "settings/flags.h"
#include "settings/usage.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::trainer {
namespace {

using launch::LaunchError;
using settings::OnResume;
using settings::Table;

constexpr const char* kVerb = "train";
constexpr std::int64_t kLarge = std::int64_t{1} << 40;

// The value of a flag that must be known before the others are read; empty without it.
std::string early_value(const std::vector<std::string>& words, const std::string& flag) {
  std::string value;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == flag && i + 1 < words.size()) value = words[i + 1];
    if (words[i].starts_with(flag + "=")) value = words[i].substr(flag.size() + 1);
  }
  return value;
}

void check_is_run(const std::string& folder) {
  if (std::filesystem::exists(folder + "/config.toml")) return;
  throw LaunchError(launch::kExitData, "train: there is no run in " + folder,
                    folder + "/config.toml, which every run writes, is missing",
                    "give --resume a folder that a run has made, such as runs/2026-11-15-1");
}

// State is cut anew for other ranks, but samples are counted over all of them.
void check_samples(const std::string& folder, const Settings& saved, const Settings& given) {
  const auto words = [](const Settings& one) {
    return "--ranks " + std::to_string(one.num_ranks) + " --batch " + std::to_string(one.batch);
  };
  const std::int64_t before = saved.data_ranks() * saved.batch;
  const std::int64_t now = given.data_ranks() * given.batch;
  if (before == now) return;
  const bool divides = before % given.data_ranks() == 0;
  throw LaunchError(launch::kExitConfiguration,
                    "train: a step of " + folder + " has " + std::to_string(before) +
                        " samples over all ranks, one of this call " + std::to_string(now),
                    "the run has " + words(saved) + ", this call has " + words(given),
                    divides ? "--batch " + std::to_string(before / given.data_ranks())
                            : "--ranks and --batch whose product is " + std::to_string(before));
}

}  // namespace

Settings::~Settings() = default;

void Settings::check() const {
  if (save.empty()) return;
  if (!resume.empty()) {
    throw settings::UsageError(
        "train: --save and --resume name two folders; --resume saves where it resumes");
  }
  if (std::filesystem::exists(save + "/config.toml")) {
    throw LaunchError(launch::kExitConfiguration, "train: there is a run in " + save + " already",
                      "--save is for a new one", "--resume " + save + ", or another folder");
  }
}

settings::Setting& Settings::add_ranks(Table& table) {
  table.group("ranks");
  return table.add("ranks", num_ranks, "N", "processes on this host")
      .range(1, 4096)
      .short_flag('n');
}

void Settings::add_device(Table& table) {
  table.add("device", device, "D", "where to train").one_of({"cpu", "cuda"}).told();
  table.add("share-gpus", share_gpus, "", "several ranks per GPU").beside();
  table.add("threads", threads, "N", "of each rank (0: OMP_NUM_THREADS, or a share of the cores)")
      .range(0, 4096)
      .shown("");
}

void Settings::add_schedule(Table& table) {
  table.add("warmup", warmup, "N", "steps up to the full rate").range(0, kLarge).told();
  table.add("decay", decay, "D", "then").one_of({"none", "linear", "cosine"}).told().beside();
}

void Settings::add_checkpoints(Table& table) {
  table.add("checkpoint-every", checkpoint_every, "N", "steps (0: when told to stop)")
      .range(0, kLarge)
      .shown("");
  table.add("keep", keep, "N", "how many stay").range(0, 1000).beside();
  table.add("keep-model", keep_model, "M", "of a finished run").one_of({"best", "last", "none"});
}

void Settings::add_publishing(Table& table) {
  table.add("publish", publish, "DIR", "for tessera serve --watch").told();
  table.add("publish-every", publish_every, "S", "seconds").not_negative().beside();
}

void Settings::add_seed(Table& table, const std::string& help) {
  table.add("seed", seed, "N", help).not_negative().range(0, std::int64_t{1} << 62).fixed();
}

void Settings::add_output(Table& table) {
  table.group("output");
  table.add("runs", runs, "DIR", "where run folders go");
  table.add("save", save, "DIR", "this folder instead, with a checkpoint at the end").one_call();
  table.add("resume", resume, "DIR", "go on after the newest checkpoint of a run").one_call();
  table.add_switch("json", as_json, "one JSON object at the end");
  table.add_switch("no-events", no_events, "no files for TensorBoard").beside();
  table.add_common(print_config, wants_help);
}

void read(Settings& given, Settings& saved, const std::vector<std::string>& words, bool tells) {
  const std::string folder = early_value(words, "--resume");
  std::vector<std::string> all = words;
  if (!folder.empty()) {
    check_is_run(folder);
    const std::vector<std::string> config{"--config", folder + "/config.toml"};
    if (early_value(words, "--config").empty())
      all.insert(all.begin(), config.begin(), config.end());
    settings::read(kVerb, saved.table(), config);
  }
  settings::read(kVerb, given.table(), all);
  if (given.wants_help || given.print_config) return;
  given.check();
  if (folder.empty()) return;
  const Table before = saved.table();
  const Table now = given.table();
  const auto refused = settings::difference(before, now, OnResume::kFixed);
  if (!refused.is_empty()) {
    throw LaunchError(
        launch::kExitConfiguration,
        "train: " + folder + " has " + refused.saved + "; this call has " + refused.given,
        "its checkpoints hold the parameters and the place in the data of that run",
        "leave these flags out, or start a new run without --resume");
  }
  check_samples(folder, saved, given);
  const auto told = settings::difference(before, now, OnResume::kTold);
  if (tells && !told.is_empty()) {
    std::fprintf(stderr, "note: train: %s goes on with %s\n", folder.c_str(), told.changes.c_str());
  }
}

}  // namespace tessera::trainer
