// tessera bench — measures this machine, and Tessera beside the projects it is compared with.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <set>

#include "bench_rows.h"
#include "bench_serve.h"
#include "flags.h"
#include "launch/store_host.h"
#include "programs/captured_program.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"
#include "worker_program.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kHelp =
    R"(tessera bench [NAME ...] [flags]

  tessera bench                                 what can be measured here
  tessera bench collectives                     shared memory and Gloo on this machine, a minute
  tessera bench collectives --op all_reduce --ranks 4 --quick
  tessera bench serve pkg --rate 2000           load for tessera serve; --help has its flags
  tessera bench embedding sharding_step         benchmarks of the source tree, beside the peers

collectives is a program of its own and needs no source tree and no Python. It compares Tessera's
engines with LibTorch's Gloo on the same tensors, checks the values first, and gives the share of
the time that a copy of the bytes would take. All others are run by bench/run.py of the source tree,
beside torchrec, fbgemm and torch where they are installed. Nothing is written.

  --ranks N         collectives: processes (2)
  --op NAME         collectives: all_reduce, all_gather, reduce_scatter, all_to_all or broadcast
  --source DIR      the source tree (the one this program was built in)
  --quick           fewer repetitions
  --json            one JSON object

A ! after the state of the cores: other programs took part of them, do not trust the row.
Exit codes: 0 good, 2 wrong usage, 78 something is not there. More: docs/bench.md
)";

constexpr const char* kCollectives = "collectives";
constexpr const char* kServe = "serve";
constexpr std::chrono::minutes kLimit{10};

struct BenchWords {
  int num_ranks = 2;
  std::string op;
  std::string source;
  bool is_quick = false;
  bool as_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, BenchWords& words) {
  app.set_help_flag();
  app.add_option("--ranks", words.num_ranks)->take_last()->check(CLI::Range(2, 8));
  app.add_option("--op", words.op)
      ->take_last()
      ->check(
          CLI::IsMember({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}));
  app.add_option("--source", words.source)->take_last();
  app.add_flag("--quick", words.is_quick);
  app.add_flag("--json", words.as_json);
  app.add_flag("-h,--help", words.wants_help);
}

// The tree that --source names, or the one around this program; empty if there is none.
std::string find_source(const BenchWords& words) {
  const auto has_runner = [](const fs::path& folder) {
    std::error_code ignored;
    return fs::is_regular_file(folder / "bench/run.py", ignored);
  };
  if (!words.source.empty()) {
    if (has_runner(words.source)) return words.source;
    throw launch::LaunchError(launch::kExitConfiguration,
                              "bench: " + words.source + " is not Tessera's source tree",
                              "it has no bench/run.py", "give --source the folder of a checkout");
  }
  std::error_code ignored;
  fs::path folder = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (; folder.has_relative_path(); folder = folder.parent_path()) {
    if (has_runner(folder)) return folder.string();
  }
  return "";
}

// `python bench/run.py`, to which words are added.
std::vector<std::string> runner_of(const std::string& source) {
  const std::string python = source + "/.venv/bin/python";
  if (access(python.c_str(), X_OK) != 0) {
    throw launch::LaunchError(
        launch::kExitConfiguration, "bench: there is no Python to run " + source + "/bench/run.py",
        python + ", which make installs, is missing", "run make in " + source);
  }
  return {python, source + "/bench/run.py"};
}

// Beside the worker, in the build folder as in an installation; empty if it was not built.
std::string find_collectives_program() {
  const std::string worker = launch::find_worker_program();
  if (worker.empty()) return "";
  const std::string path = (fs::path(worker).parent_path() / "collectives_bench").string();
  return access(path.c_str(), X_OK) == 0 ? path : "";
}

int list(const BenchWords& words) {
  if (words.as_json) throw UsageError("bench: --json needs the name of a benchmark");
  std::printf("a program of its own\n  %-20s Collectives over shared memory, beside Gloo%s\n",
              kCollectives, find_collectives_program().empty() ? " (not built)" : "");
  std::printf("  %-20s Requests to a server, at times of their own\n", kServe);
  const std::string source = find_source(words);
  if (source.empty()) {
    std::puts("of the source tree: there is none around this program; --source names one");
    return launch::kExitOk;
  }
  std::printf("of the source tree in %s\n", source.c_str());
  std::vector<std::string> command = runner_of(source);
  command.emplace_back("--list");
  std::fflush(stdout);
  become_program("bench", std::move(command));
}

int measure_collectives(const BenchWords& words) {
  const std::string program = find_collectives_program();
  if (program.empty()) {
    throw launch::LaunchError(launch::kExitConfiguration,
                              "bench: there is no collectives_bench program",
                              "it is not beside tessera-worker: it is built with the benchmarks",
                              "ninja collectives_bench in the build folder, or make everything");
  }
  std::vector<std::string> command = {program, "--ranks", std::to_string(words.num_ranks),
                                      "--seconds", words.is_quick ? "0.02" : "0.2"};
  if (!words.op.empty()) command.insert(command.end(), {"--op", words.op});
  const Outcome outcome = run_program(command, kLimit);
  std::fputs(outcome.err.c_str(), stderr);
  const std::vector<BenchRow> rows = read_bench_rows(outcome.out);
  if (!outcome.was_started || outcome.timed_out || outcome.status != 0 || rows.empty()) {
    throw launch::LaunchError(
        launch::kExitInternal, "bench: collectives_bench gave no whole answer",
        outcome.timed_out ? "it did not end within ten minutes" : "it failed; see above",
        "tessera doctor, which checks the engines");
  }
  if (words.as_json) {
    const nlohmann::ordered_json answer{
        {"benchmark", kCollectives}, {"ranks", words.num_ranks}, {"rows", bench_json(rows)}};
    std::printf("%s\n", answer.dump().c_str());
  } else {
    std::printf("%d ranks; bytes are those of one rank\n%s", words.num_ranks,
                bench_table(rows).c_str());
  }
  return launch::kExitOk;
}

int measure_tree(const BenchWords& words, const std::vector<std::string>& names) {
  const std::string source = find_source(words);
  if (source.empty()) {
    throw launch::LaunchError(
        launch::kExitConfiguration, "bench: there is no source tree to measure " + names[0] + " in",
        "this program is installed, and the peers and their programs are in no installation",
        "tessera bench collectives, or --source with the folder of a checkout");
  }
  std::vector<std::string> command = runner_of(source);
  command.insert(command.end(), names.begin(), names.end());
  command.emplace_back("--print-only");
  if (words.is_quick) command.emplace_back("--quick");
  if (words.as_json) command.emplace_back("--json");
  become_program("bench", std::move(command));
}

int run(const std::vector<std::string>& words) {
  if (!words.empty() && words[0] == kServe) return bench_serve({words.begin() + 1, words.end()});
  CLI::App app("", "bench");
  BenchWords given;
  define_flags(app, given);
  const NamesAndFlags sorted = names_and_flags(app, words);
  read_flags(app, sorted.flags);
  if (given.wants_help) return print_help(kHelp);
  if (sorted.names.empty()) return list(given);
  const bool has_own =
      std::find(sorted.names.begin(), sorted.names.end(), kCollectives) != sorted.names.end();
  if (has_own && sorted.names.size() > 1) {
    throw UsageError(
        "bench: collectives is measured by itself; comm_collectives is the same in a list");
  }
  if (has_own) return measure_collectives(given);
  // What these are mistyped for is no benchmark of the tree, but "serving" is.
  const std::string meant = suggestion(sorted.names[0], {kCollectives, kServe});
  if (!meant.empty() && sorted.names[0] != "serving") {
    throw UsageError("bench: there is no '" + sorted.names[0] + "'" + meant);
  }
  if (app.count("--ranks") + app.count("--op") > 0) {
    throw UsageError("bench: --ranks and --op are for collectives, not for " + sorted.names[0]);
  }
  return measure_tree(given, sorted.names);
}

std::vector<std::string> flags() {
  CLI::App app("", "bench");
  BenchWords words;
  define_flags(app, words);
  std::set<std::string> all;
  for (std::string& flag : long_flags(app)) all.insert(std::move(flag));
  for (std::string& flag : bench_serve_flags()) all.insert(std::move(flag));
  return {all.begin(), all.end()};
}

std::map<std::string, std::string> values() {
  return {{"--op", "all_reduce all_gather reduce_scatter all_to_all broadcast"},
          {"--format", "binary json"}};
}

}  // namespace

const Verb kBenchVerb{"bench", "measure this machine, and Tessera beside its peers",
                      kHelp,   run,
                      flags,   "collectives serve",
                      values};

}  // namespace tessera::cli
