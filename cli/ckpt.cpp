// tessera ckpt — lists, checks, shows, cuts anew and exports checkpoints.

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>

#include <nlohmann/json.hpp>

#include "ckpt_ids.h"
#include "ckpt_plan.h"
#include "data/input.h"
#include "flags.h"
#include "newest_checkpoint.h"
#include "plan_failure.h"
#include "report/run_folder.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/replan.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

using checkpoint::Manifest;
using checkpoint::Reader;
using Json = nlohmann::ordered_json;

constexpr std::string_view kHelp =
    R"(tessera ckpt ls|verify|show|ids|reshard|export|import|compact DIR [flags]

  tessera ckpt ls runs/a                                  what is there, and whether it opens
  tessera ckpt verify runs/a                              read everything, compare every sum
  tessera ckpt show runs/a --step 300                     tensors, files and values of one
  tessera ckpt ids runs/a --table user --to user.csv      id, row, count, last step
  tessera ckpt reshard runs/a --ranks 8 --to runs/b       cut for 8 ranks, under another folder
  tessera ckpt export runs/a --to model.safetensors       one plain file
  tessera ckpt import runs/a --from model.safetensors     a plain file or folder as a checkpoint
  tessera ckpt compact runs/a                             make a delta whole

DIR holds folders step-... as tessera::checkpoint saves them, or is the run
folder of a training. Without --step, the newest that is whole is taken
(verify: all of them).

  --step N                  which checkpoint
  --table T                 ids: of a table that grows; to .csv, .npy,
                            .safetensors, or printed
  --ranks N                 reshard: number of ranks
  --plan FILE               reshard: a plan of tessera plan tables, for its ranks
  --cut rows|columns|whole  reshard: how tensors are cut (rows)
  --to PATH, --from PATH    where reshard, export and ids write, what import reads
  --replace                 reshard, import: also over a step that is there already
  --json                    one JSON object

Exit codes: 0 good, 2 wrong usage, 65 a checkpoint is damaged, missing or cannot be written.
More: docs/checkpoint.md
)";

struct CkptWords {
  std::int64_t step = -1;
  int ranks = 0;
  std::string cut = "rows";
  std::string plan;
  std::string to;
  std::string from;
  std::string table;
  bool replaces = false;
  bool wants_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, CkptWords& words) {
  app.set_help_flag();
  app.add_option("--step", words.step);
  app.add_option("--ranks,-n", words.ranks);
  app.add_option("--cut", words.cut);
  app.add_option("--plan", words.plan);
  app.add_option("--to", words.to);
  app.add_option("--from", words.from);
  app.add_option("--table", words.table);
  app.add_flag("--replace", words.replaces);
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

std::string bytes_text(std::uint64_t num_bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double amount = static_cast<double>(num_bytes);
  int unit = 0;
  for (; amount >= 1024 && unit < 4; ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", amount, units[unit]);
  return text;
}

std::uint64_t bytes_of(const Manifest& manifest) {
  std::uint64_t sum = 0;
  for (const auto& file : manifest.files) sum += file.num_bytes;
  return sum;
}

// The time in the manifest, which survives copying; of the folder, if there is none.
std::string time_of(const std::string& path, const std::string& saved) {
  std::tm parts{};
  std::time_t time = 0;
  struct stat facts{};
  if (::strptime(saved.c_str(), "%Y-%m-%dT%H:%M:%SZ", &parts) != nullptr) {
    time = ::timegm(&parts);
  } else if (::stat(path.c_str(), &facts) == 0) {
    time = facts.st_mtime;
  } else {
    return "";
  }
  ::localtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M", &parts);
  return text;
}

void print(const Json& answer) { std::printf("%s\n", answer.dump(2).c_str()); }

// A disk that does not answer says nothing about the checkpoint.
const char* state_of(const checkpoint::Error& error) {
  return error.kind() == checkpoint::ErrorKind::kRead ? "unknown" : "damaged";
}

void check_has_some(const std::string& root) {
  if (!checkpoint::list_steps(root).empty()) return;
  throw checkpoint::Error(checkpoint::ErrorKind::kMissing, root + ": there is no checkpoint.");
}

int list(const std::string& root, const CkptWords& words) {
  check_has_some(root);
  Json answer = {{"root", root}, {"latest", checkpoint::latest_folder(root)}};
  answer["checkpoints"] = Json::array();
  int code = launch::kExitOk;
  if (!words.wants_json) {
    std::printf("%14s  %-16s  %5s  %7s  %9s  %s\n", "step", "saved", "ranks", "tensors", "bytes",
                "state");
  }
  for (const std::int64_t step : checkpoint::list_steps(root)) {
    std::string saved = time_of(root + "/" + checkpoint::folder_name(step), "");
    Json row = {{"step", step}, {"saved", saved}};
    try {
      const Reader reader(root, step);
      const Manifest& manifest = reader.manifest();
      saved = time_of(reader.folder(), manifest.saved);
      row["saved"] = saved;
      row["commit"] = manifest.commit;
      const std::string state =
          manifest.base ? "delta on " + manifest.base->folder : std::string("whole");
      row["ranks"] = manifest.world;
      row["tensors"] = reader.tensors().size();
      row["bytes"] = bytes_of(manifest);
      row["state"] = state;
      if (!words.wants_json) {
        std::printf("%14lld  %-16s  %5d  %7zu  %9s  %s\n", static_cast<long long>(step),
                    saved.c_str(), manifest.world, reader.tensors().size(),
                    bytes_text(bytes_of(manifest)).c_str(), state.c_str());
      }
    } catch (const checkpoint::Error& error) {
      code = launch::kExitData;
      row["state"] = state_of(error);
      row["problem"] = error.what();
      if (!words.wants_json) {
        std::printf("%14lld  %-16s  %5s  %7s  %9s  %s: %s\n", static_cast<long long>(step),
                    saved.c_str(), "", "", "", state_of(error), error.what());
      }
    }
    answer["checkpoints"].push_back(std::move(row));
  }
  if (words.wants_json) print(answer);
  return code;
}

int verify(const std::string& root, const CkptWords& words) {
  std::vector<std::int64_t> steps = checkpoint::list_steps(root);
  if (words.step >= 0) steps = {words.step};
  if (steps.empty()) check_has_some(root);
  Json answer = {{"root", root}, {"checkpoints", Json::array()}};
  int code = launch::kExitOk;
  for (const std::int64_t step : steps) {
    Json row = {{"step", step}};
    std::uint64_t num_bytes = 0;
    std::timespec begin{};
    std::timespec end{};
    ::clock_gettime(CLOCK_MONOTONIC, &begin);
    try {
      const Reader reader(root, step);
      reader.verify([&](std::uint64_t done) { num_bytes = done; });
      ::clock_gettime(CLOCK_MONOTONIC, &end);
      const double seconds = static_cast<double>(end.tv_sec - begin.tv_sec) +
                             1e-9 * static_cast<double>(end.tv_nsec - begin.tv_nsec);
      row["good"] = true;
      row["bytes"] = num_bytes;
      row["seconds"] = seconds;
      if (!words.wants_json) {
        std::printf("%14lld  good     %9s in %.2f s\n", static_cast<long long>(step),
                    bytes_text(num_bytes).c_str(), seconds);
      }
    } catch (const checkpoint::Error& error) {
      code = launch::kExitData;
      row["good"] = false;
      row["problem"] = error.what();
      if (!words.wants_json) {
        std::printf("%14lld  %s  %s\n", static_cast<long long>(step), state_of(error),
                    error.what());
      }
    }
    answer["checkpoints"].push_back(std::move(row));
  }
  if (words.wants_json) print(answer);
  return code;
}

Json json_of(const checkpoint::Values& values) {
  Json object = Json::object();
  for (const auto& [name, value] : values) {
    std::visit([&](const auto& v) { object[name] = v; }, value);
  }
  return object;
}

int show(const std::string& root, const CkptWords& words) {
  const auto opened = open_newest(root, words.step);
  const Reader& reader = *opened;
  const Manifest& manifest = reader.manifest();
  Json answer = {{"folder", reader.folder()},
                 {"step", manifest.step},
                 {"commit", manifest.commit},
                 {"saved", manifest.saved},
                 {"job", manifest.job},
                 {"ranks", manifest.world},
                 {"plan", manifest.plan},
                 {"sha256", manifest.sha256},
                 {"values", json_of(manifest.values)},
                 {"rank_values", Json::array()},
                 {"files", Json::array()},
                 {"tensors", Json::array()}};
  for (const auto& values : manifest.rank_values) {
    answer["rank_values"].push_back(json_of(values));
  }
  if (manifest.base) answer["base"] = manifest.base->folder;
  for (const auto& file : manifest.files) {
    answer["files"].push_back({{"name", file.name}, {"bytes", file.num_bytes}});
  }
  for (const auto& tensor : reader.tensors()) {
    const auto* record = manifest.find(tensor.name);
    answer["tensors"].push_back({{"name", tensor.name},
                                 {"dtype", checkpoint::name_of(tensor.dtype)},
                                 {"shape", tensor.shape},
                                 {"regions", record == nullptr ? 0 : record->regions.size()}});
  }
  if (words.wants_json) {
    print(answer);
    return launch::kExitOk;
  }
  std::printf("folder   %s\nstep     %lld, %d ranks, %s in %zu files\n", reader.folder().c_str(),
              static_cast<long long>(manifest.step), manifest.world,
              bytes_text(bytes_of(manifest)).c_str(), manifest.files.size());
  if (manifest.commit > 0) {
    std::printf("commit   %lld, %s, job %s\n", static_cast<long long>(manifest.commit),
                manifest.saved.c_str(), manifest.job.c_str());
  }
  if (manifest.base) std::printf("base     %s\n", manifest.base->folder.c_str());
  if (!manifest.plan.empty()) std::printf("plan     %s\n", manifest.plan.c_str());
  for (const auto& [name, value] : answer["values"].items()) {
    std::printf("value    %s = %s\n", name.c_str(), value.dump().substr(0, 80).c_str());
  }
  for (const auto& tensor : reader.tensors()) {
    const auto* record = manifest.find(tensor.name);
    const std::string regions =
        record == nullptr ? "delta" : std::to_string(record->regions.size());
    std::printf("tensor   %-40s %-5s %-20s %s\n", tensor.name.c_str(),
                checkpoint::name_of(tensor.dtype), checkpoint::text_of(tensor.shape).c_str(),
                regions.c_str());
  }
  return launch::kExitOk;
}

std::string needed(const std::string& value, const char* flag, const char* verb) {
  if (value.empty()) {
    throw UsageError(std::string("ckpt: ") + verb + " needs " + flag + " PATH");
  }
  return value;
}

void say_saved(const Manifest& manifest, const std::string& where, const CkptWords& words) {
  if (words.wants_json) {
    print({{"path", where},
           {"step", manifest.step},
           {"ranks", manifest.world},
           {"bytes", bytes_of(manifest)}});
    return;
  }
  std::printf("wrote step %lld for %d ranks, %s: %s\n", static_cast<long long>(manifest.step),
              manifest.world, bytes_text(bytes_of(manifest)).c_str(), where.c_str());
}

// Tables as a plan lays them, everything else whole.
int cut_by_plan(const std::string& root, const CkptWords& words, const std::string& to) {
  planner::Plan plan;
  try {
    plan = planner::plan_from_json(workloads::report::read_text(words.plan));
  } catch (const planner::PlanError& error) {
    throw plan_failure(error);
  } catch (const workloads::report::Error& error) {
    throw checkpoint::Error(checkpoint::ErrorKind::kInvalid, error.what());
  }
  const auto opened = open_newest(root, words.step);
  const PlannedTensors planned = planned_tensors(plan, *opened);
  const int ranks = words.ranks > 0 ? words.ranks : planned.num_ranks;
  say_saved(checkpoint::reshard(*opened, to, ranks, planned.places, checkpoint::Disk::real(),
                                words.replaces),
            to, words);
  return launch::kExitOk;
}

int cut_anew(const std::string& root, const CkptWords& words) {
  const std::string& to = needed(words.to, "--to", "reshard");
  if (!words.replaces) workloads::data::check_apart({root}, to);
  if (!words.plan.empty()) {
    if (words.cut != "rows") throw UsageError("ckpt: reshard takes --cut or --plan, not both");
    return cut_by_plan(root, words, to);
  }
  if (words.ranks < 1) throw UsageError("ckpt: reshard needs --ranks N, 1 or more, or --plan FILE");
  const std::map<std::string, checkpoint::Cut> cuts = {{"rows", checkpoint::Cut::kRows},
                                                       {"columns", checkpoint::Cut::kColumns},
                                                       {"whole", checkpoint::Cut::kWhole}};
  const auto cut = cuts.find(words.cut);
  if (cut == cuts.end()) {
    throw UsageError("ckpt: --cut is rows, columns or whole, not '" + words.cut + "'");
  }
  const auto opened = open_newest(root, words.step);
  const Reader& reader = *opened;
  say_saved(checkpoint::reshard(reader, to, words.ranks, cut->second, checkpoint::Disk::real(),
                                words.replaces),
            to, words);
  return launch::kExitOk;
}

// The files of all checkpoints of a folder, of one that a delta stands on too.
std::vector<std::string> files_of(const std::string& root) {
  std::vector<std::string> files;
  for (const std::int64_t step : checkpoint::list_steps(root)) {
    const std::string folder = root + "/" + checkpoint::folder_name(step);
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      files.push_back(entry.path().string());
    }
  }
  return files;
}

int export_file(const std::string& root, const CkptWords& words) {
  const std::string& to = needed(words.to, "--to", "export");
  workloads::data::check_apart(files_of(root), to);
  const auto opened = open_newest(root, words.step);
  const Reader& reader = *opened;
  checkpoint::export_plain(reader, to);
  say_saved(reader.manifest(), to, words);
  return launch::kExitOk;
}

int show_ids(const std::string& root, const CkptWords& words) {
  if (!words.to.empty()) workloads::data::check_apart(files_of(root), words.to);
  list_ids(*open_newest(root, words.step), words.table, words.to);
  return launch::kExitOk;
}

int import_file(const std::string& root, const CkptWords& words) {
  const std::string& from = needed(words.from, "--from", "import");
  const std::int64_t step = std::max<std::int64_t>(words.step, 0);
  const std::string target = root + "/" + checkpoint::folder_name(step);
  // A file in the folder that is replaced would go with it.
  const std::filesystem::path folder = std::filesystem::path(from).parent_path();
  workloads::data::check_apart({from, folder.empty() ? "." : folder.string()}, target);
  say_saved(checkpoint::import_plain(from, root, step, checkpoint::Disk::real(), words.replaces),
            root, words);
  return launch::kExitOk;
}

int compact_delta(const std::string& root, const CkptWords& words) {
  const std::int64_t step =
      words.step >= 0 ? words.step : open_newest(root, words.step)->manifest().step;
  say_saved(checkpoint::compact(root, step), root, words);
  return launch::kExitOk;
}

using Action = int (*)(const std::string& root, const CkptWords& words);

const std::map<std::string, Action>& actions() {
  static const std::map<std::string, Action> kActions = {{"ls", list},
                                                         {"verify", verify},
                                                         {"show", show},
                                                         {"ids", show_ids},
                                                         {"reshard", cut_anew},
                                                         {"export", export_file},
                                                         {"import", import_file},
                                                         {"compact", compact_delta}};
  return kActions;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "ckpt");
  CkptWords given;
  define_flags(app, given);
  if (words.empty()) throw UsageError("ckpt: say what to do, as in tessera ckpt ls DIR");
  if (words[0] == "--help" || words[0] == "-h") return print_help(kHelp);
  const auto action = actions().find(words[0]);
  if (action == actions().end()) {
    std::vector<std::string> known;
    for (const auto& [name, function] : actions()) known.push_back(name);
    throw UsageError("ckpt: there is no '" + words[0] + "'" + suggestion(words[0], known));
  }
  const auto [names, flags] = names_and_flags(app, {words.begin() + 1, words.end()});
  read_flags(app, flags);
  if (given.wants_help) return print_help(kHelp);
  if (names.size() != 1) {
    throw UsageError("ckpt: name one folder, as in tessera ckpt " + words[0] + " DIR");
  }
  try {
    return action->second(words[0] == "import" ? names[0] : root_of(names[0]), given);
  } catch (const checkpoint::Error& error) {
    throw launch::LaunchError(launch::kExitData, "ckpt: " + words[0] + " " + names[0], error.what(),
                              "tessera ckpt ls " + names[0] + " shows what is there");
  } catch (const workloads::data::DataError& error) {
    throw launch::LaunchError(launch::kExitData, "ckpt: " + words[0] + " " + names[0], error.what(),
                              "another " + std::string(words[0] == "import" ? "--from" : "--to"));
  }
}

std::vector<std::string> flags() {
  CLI::App app("", "ckpt");
  CkptWords words;
  define_flags(app, words);
  return long_flags(app);
}

std::map<std::string, std::string> values() { return {{"--cut", "rows columns whole"}}; }

}  // namespace

const Verb kCkptVerb{"ckpt", "list, verify, show, reshard, export checkpoints",  kHelp, run,
                     flags,  "ls verify show ids reshard export import compact", values};

}  // namespace tessera::cli
