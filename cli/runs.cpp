// tessera runs — lists run folders and compares two.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "data/input.h"
#include "flags.h"
#include "report/comparison.h"
#include "report/html.h"
#include "report/run_folder.h"
#include "report/run_record.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
namespace report = workloads::report;
using Json = nlohmann::ordered_json;

constexpr std::string_view kHelp =
    R"(tessera runs [FOLDER | diff A B] [flags]

  tessera runs                            those in runs/: how each ended, how good
  tessera runs diff 2026-11-15-1 2026-11-15-2

diff prints settings that differ and figures, and draws both runs into one page.
A run is a folder that tessera train has written. A name alone is looked for in runs/ too.

  --out PAGE   diff: the page to write (compare.html in the folder of B)
  --json       one JSON object

Exit codes: 0 good, 2 wrong usage, 65 no such run.
More: docs/report.md
)";

struct Words {
  std::string out;
  bool as_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  app.set_help_flag();
  app.add_option("--out", words.out);
  app.add_flag("--json", words.as_json);
  app.add_flag("-h,--help", words.wants_help);
}

bool is_run(const fs::path& folder) { return fs::exists(folder / report::kMetricsFile); }

// Folders, or one that holds them.
std::vector<fs::path> runs_in(const std::string& root) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root, error)) {
    if (entry.is_directory(error) && is_run(entry.path())) found.push_back(entry.path());
  }
  // 2026-11-15-9 before 2026-11-15-10.
  std::sort(found.begin(), found.end(), [](const fs::path& a, const fs::path& b) {
    const std::string one = a.filename().string();
    const std::string other = b.filename().string();
    return one.size() != other.size() &&
                   one.substr(0, one.rfind('-')) == other.substr(0, other.rfind('-'))
               ? one.size() < other.size()
               : one < other;
  });
  return found;
}

std::string folder_of(const std::string& name) {
  if (is_run(name)) return name;
  if (is_run(fs::path("runs") / name)) return (fs::path("runs") / name).string();
  std::vector<std::string> known;
  for (const fs::path& one : runs_in("runs")) known.push_back(one.filename().string());
  const std::string hint = suggestion(name, known);
  throw launch::LaunchError(launch::kExitData, "runs: there is no run in " + name,
                            "metrics.jsonl, which every run writes, is missing" + hint,
                            "tessera runs lists those in runs/");
}

std::string figure_text(const report::RunRecord& run) {
  if (run.evals.empty()) {
    return run.steps.empty() ? "" : "loss " + report::number(run.steps.back().loss);
  }
  std::string text;
  for (const auto& [name, value] : report::figures_of(run.evals.back())) {
    if (name == "normalised_entropy" || name == "calibration") continue;
    text += (text.empty() ? "" : ", ") + name + " " + report::number(value);
  }
  std::replace(text.begin(), text.end(), '_', ' ');
  return text;
}

std::string status_of(const report::RunRecord& run) {
  return run.has_ended ? run.status : "not finished";
}

std::int64_t steps_of(const report::RunRecord& run) {
  return run.has_ended || run.steps.empty() ? run.total_steps : run.steps.back().step;
}

Json json_of(const std::string& folder, const report::RunRecord& run) {
  Json one{{"folder", folder},
           {"workload", run.workload},
           {"status", status_of(run)},
           {"steps", steps_of(run)},
           {"ranks", run.num_ranks},
           {"started", run.started},
           {"seconds", run.total_seconds},
           {"best_step", run.best_step}};
  if (!run.steps.empty()) one["loss"] = run.steps.back().loss;
  if (!run.evals.empty()) {
    for (const auto& [name, value] : report::figures_of(run.evals.back())) one[name] = value;
  }
  return one;
}

void print(const Json& answer) {
  std::printf("%s\n", answer.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

int list(const std::string& root, const Words& words) {
  const std::vector<fs::path> folders = runs_in(root);
  Json all = Json::array();
  if (folders.empty() && !words.as_json) {
    std::printf("there is no run in %s\n", root.c_str());
    return launch::kExitOk;
  }
  if (!words.as_json) {
    std::printf("%-18s %-8s %-13s %7s  %s\n", "run", "workload", "status", "steps", "evaluation");
  }
  for (const fs::path& folder : folders) {
    const std::string name = folder.filename().string();
    try {
      const report::RunRecord run = report::read_run(folder.string());
      if (words.as_json) {
        all.push_back(json_of(folder.string(), run));
      } else {
        std::printf("%-18s %-8s %-13s %7lld  %s\n", name.c_str(), run.workload.c_str(),
                    status_of(run).c_str(), static_cast<long long>(steps_of(run)),
                    figure_text(run).c_str());
      }
    } catch (const report::Error& error) {
      // One that is damaged does not hide the others.
      if (words.as_json) {
        all.push_back(
            {{"folder", folder.string()}, {"status", "damaged"}, {"error", error.what()}});
      } else {
        std::printf("%-18s %-8s %-13s %7s  %s\n", name.c_str(), "", "damaged", "", error.what());
      }
    }
  }
  if (words.as_json) print(all);
  return launch::kExitOk;
}

Json json_of(const std::vector<report::Difference>& rows) {
  Json all = Json::object();
  for (const report::Difference& row : rows) all[row.name] = {row.first, row.second};
  return all;
}

void print_rows(const char* title, const std::vector<report::Difference>& rows) {
  std::size_t widest = 0;
  std::size_t middle = 0;
  for (const report::Difference& row : rows) {
    widest = std::max(widest, row.name.size());
    middle = std::max(middle, row.first.size());
  }
  std::printf("%s\n", title);
  for (const report::Difference& row : rows) {
    std::printf("  %-*s  %-*s  %s\n", static_cast<int>(widest), row.name.c_str(),
                static_cast<int>(middle), row.first.empty() ? "-" : row.first.c_str(),
                row.second.empty() ? "-" : row.second.c_str());
  }
}

int diff(const std::vector<std::string>& names, const Words& words) {
  if (names.size() != 2) throw UsageError("runs: diff compares two runs, as in runs diff A B");
  const std::string one = folder_of(names[0]);
  const std::string other = folder_of(names[1]);
  const std::string page = words.out.empty() ? other + "/compare.html" : words.out;
  try {
    std::vector<std::string> files;
    for (const std::string& folder : {one, other}) {
      for (const char* name : {report::kMetricsFile, report::kConfigFile, report::kTraceFile}) {
        files.push_back(folder + "/" + name);
      }
    }
    workloads::data::check_apart(files, page);
    const report::RunRecord first = report::read_run(one);
    const report::RunRecord second = report::read_run(other);
    report::write_text(page, report::make_comparison(first, second));
    const auto settings = report::setting_differences(first, second);
    const auto figures = report::figure_rows(first, second);
    if (words.as_json) {
      print({{"runs", {one, other}},
             {"settings", json_of(settings)},
             {"figures", json_of(figures)},
             {"page", page}});
      return launch::kExitOk;
    }
    print_rows(settings.empty() ? "settings are the same" : "settings that differ", settings);
    print_rows("figures", figures);
    std::printf("page     %s\n", page.c_str());
  } catch (const workloads::data::DataError& error) {
    throw launch::LaunchError(launch::kExitData, std::string("runs: ") + error.what(),
                              "--out names a file of a run that is compared", "another --out");
  } catch (const report::Error& error) {
    throw launch::LaunchError(launch::kExitData, std::string("runs: ") + error.what(),
                              "the folder is damaged, or the page cannot be written",
                              "name two folders that tessera train has written");
  }
  return launch::kExitOk;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "runs");
  Words given;
  define_flags(app, given);
  const NamesAndFlags split = names_and_flags(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (!split.names.empty() && split.names[0] == "diff") {
    return diff({split.names.begin() + 1, split.names.end()}, given);
  }
  if (split.names.size() > 1) {
    const std::string meant = suggestion(split.names[0], {"diff"});
    throw UsageError(meant.empty() ? "runs: name one folder, or say runs diff A B"
                                   : "runs: there is no '" + split.names[0] + "'" + meant);
  }
  const std::string root = split.names.empty() ? "runs" : split.names[0];
  if (!split.names.empty() && !fs::is_directory(root)) {
    throw launch::LaunchError(launch::kExitData, "runs: there is no folder " + root,
                              "it should hold the folders of runs",
                              "name the folder that --runs named");
  }
  return list(root, given);
}

std::vector<std::string> flags() {
  CLI::App app("", "runs");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const Verb kRunsVerb{"runs", "list runs, and compare two", kHelp, run, flags, "diff"};

}  // namespace tessera::cli
