// tessera ps — the jobs of this user that run on this host.

#include <cstdio>

#include <nlohmann/json.hpp>

#include "flags.h"
#include "job_text.h"
#include "launch/live_jobs.h"
#include "tessera/launch/exit_code.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera ps [--json]

  tessera ps                 one line for every job of tessera run that still runs
  tessera ps --json          the same for programs

Lists jobs of this user on this host: name, process of the launcher, ranks here, hosts, attempt,
how long it runs, and the program. Jobs that were started with another TMPDIR are listed with it.

  --json       a list of: name, pid, seconds, local_ranks, nodes, node_rank, attempt, command

Exit code: 0. More: docs/launch.md
)";

struct Words {
  bool as_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  app.set_help_flag();
  app.add_flag("--json", words.as_json);
  app.add_flag("-h,--help", words.wants_help);
}

void print_table(const std::vector<launch::LiveJob>& jobs) {
  if (jobs.empty()) {
    std::puts("no job of this user runs on this host");
    return;
  }
  std::printf("%-24s %8s %5s %6s %7s %9s  %s\n", "job", "pid", "ranks", "node", "attempt", "time",
              "program");
  for (const launch::LiveJob& job : jobs) {
    const std::string node = std::to_string(job.node_rank) + "/" + std::to_string(job.num_nodes);
    std::printf("%-24s %8ld %5d %6s %7d %9s  %s\n", job.name.c_str(), static_cast<long>(job.pid),
                job.num_local_ranks, node.c_str(), job.attempt,
                duration_text(seconds_since(job.begin_ns)).c_str(),
                command_text(job.command).c_str());
  }
}

void print_json(const std::vector<launch::LiveJob>& jobs) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const launch::LiveJob& job : jobs) {
    list.push_back({{"name", job.name},
                    {"pid", job.pid},
                    {"seconds", seconds_since(job.begin_ns)},
                    {"local_ranks", job.num_local_ranks},
                    {"nodes", job.num_nodes},
                    {"node_rank", job.node_rank},
                    {"attempt", job.attempt},
                    {"command", job.command}});
  }
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  std::printf("%s\n", list.dump(2, ' ', false, replace).c_str());
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "ps");
  Words given;
  define_flags(app, given);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (!split.rest.empty()) throw UsageError("ps: takes flags only, not '" + split.rest[0] + "'");
  const auto jobs = launch::live_jobs();
  if (given.as_json) {
    print_json(jobs);
  } else {
    print_table(jobs);
  }
  return launch::kExitOk;
}

std::vector<std::string> flags() {
  CLI::App app("", "ps");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const Verb kPsVerb{"ps", "list the jobs of this user that run on this host", kHelp, run, flags};

}  // namespace tessera::cli
