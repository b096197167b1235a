// tessera inspect — what each rank of a running job is doing.

#include <algorithm>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "flags.h"
#include "job_text.h"
#include "launch/live_jobs.h"
#include "launch/live_ranks.h"
#include "tessera/launch/exit_code.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

using launch::LiveJob;
using launch::LiveRank;
using launch::RankOperation;

constexpr std::string_view kHelp =
    R"(tessera inspect [JOB] [--rank R]... [--stacks] [--json]

  tessera inspect                      the ranks of the one job that runs
  tessera inspect nightly              of the job with this name, or with this launcher's process
  tessera inspect nightly --stacks     and where each of their threads is
  tessera inspect nightly --json       the same for programs

Shows the ranks on this host of a job of this user: what the rank does, its step (comm::set_step),
the operation it is in or was in last and for how long, whom it waits for, memory (resident, and the
part of it that is shared), time on processors, threads. Reads what the ranks write down anyway and
what the system knows: nothing is sent to them. A program without Tessera's groups shows only the
latter.

  --rank R     this rank only; may be repeated
  --stacks     ask the ranks where their threads are, those of Python by their lines; each gets a
               signal, which may end a sleep early as any signal does
  --json       an object: name, pid, seconds, nodes, node_rank, attempt, command, ranks

Exit code: 0; 2 if there is no such job, or several and none is named. More: docs/inspect.md
)";

struct Words {
  std::vector<int> ranks;
  bool wants_stacks = false;
  bool as_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  app.set_help_flag();
  app.add_option("--rank", words.ranks);
  app.add_flag("--stacks", words.wants_stacks);
  app.add_flag("--json", words.as_json);
  app.add_flag("-h,--help", words.wants_help);
}

LiveJob find_job(const std::vector<std::string>& words) {
  const std::vector<LiveJob> jobs = launch::live_jobs();
  if (jobs.empty()) throw UsageError("inspect: no job of this user runs on this host");
  std::vector<std::string> names;
  std::vector<LiveJob> fitting;
  for (const LiveJob& job : jobs) {
    names.push_back(job.name);
    if (words.empty() || job.name == words[0] || std::to_string(job.pid) == words[0]) {
      fitting.push_back(job);
    }
  }
  std::string list;
  for (const LiveJob& job : fitting.empty() ? jobs : fitting) {
    list += (list.empty() ? "" : ", ") + job.name + " (" + std::to_string(job.pid) + ")";
  }
  if (fitting.empty()) {
    throw UsageError("inspect: no job '" + words[0] + "' runs here" + suggestion(words[0], names) +
                     "; there are: " + list);
  }
  if (fitting.size() > 1) {
    throw UsageError("inspect: several jobs run here; name one, by its process if need be: " +
                     list);
  }
  return fitting[0];
}

const RankOperation* operation_of(const LiveRank& rank) {
  return rank.operations.empty() ? nullptr : rank.operations.data();
}

std::string_view state_of(const LiveRank& rank) {
  if (!rank.is_there) return "ended";
  if (rank.state == 'T' || rank.state == 't') return "stopped";
  const RankOperation* operation = operation_of(rank);
  if (operation != nullptr && operation->is_under_way) {
    return operation->num_waiting_for > 0 ? "waiting" : "communicating";
  }
  if (rank.state == 'R') return "computing";
  return rank.state == 'D' ? "in the kernel" : "sleeping";
}

std::string operation_text(const RankOperation& operation) {
  std::string text = operation.operation + " #" + std::to_string(operation.sequence);
  if (!operation.details.empty()) text += " " + operation.details;
  return text + " of '" + operation.group + "'" + (operation.is_under_way ? "" : " done");
}

std::string waiting_text(const RankOperation& operation) {
  if (operation.waiting_for.empty()) return "-";
  std::string text = operation.num_waiting_for == 1 ? "rank" : "ranks";
  for (const int rank : operation.waiting_for) text += " " + std::to_string(rank);
  const auto num_shown = static_cast<int>(operation.waiting_for.size());
  const int num_more = operation.num_waiting_for - num_shown;
  return num_more > 0 ? text + " and " + std::to_string(num_more) + " more" : text;
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), seconds < 100 ? "%.1f s" : "%.0f s", seconds);
  return text;
}

std::string bytes_text(int64_t bytes) {
  char text[32];
  const double mebibytes = static_cast<double>(bytes) / (1 << 20);
  if (mebibytes < 1000) {
    std::snprintf(text, sizeof(text), "%.0f MiB", mebibytes);
  } else {
    std::snprintf(text, sizeof(text), "%.1f GiB", mebibytes / 1024);
  }
  return text;
}

// Every line indented, and nothing in it that a terminal would obey.
void print_indented(const std::string& text) {
  bool begins = true;
  for (const char c : text) {
    if (begins) std::fputs("      ", stdout);
    begins = c == '\n';
    const bool is_shown = begins || (static_cast<unsigned char>(c) >= ' ' && c != '\x7f');
    std::putchar(is_shown ? c : '?');
  }
}

void print_stacks(const LiveRank& rank) {
  std::printf("\nrank %d (pid %ld)\n", rank.rank, static_cast<long>(rank.pid));
  if (!rank.python_stacks.empty()) {
    std::printf("  Python\n");
    print_indented(rank.python_stacks);
  }
  for (const launch::ThreadStack& stack : rank.stacks) {
    std::printf("  thread %ld (%s)%s\n", static_cast<long>(stack.thread), stack.name.c_str(),
                stack.frames.empty() ? ": no answer" : "");
    print_indented(stack.frames);
  }
  if (rank.stacks.empty() && rank.python_stacks.empty()) {
    std::printf("  no stacks: its program has made no group of Tessera's, or does not run\n");
  }
}

void print_table(const LiveJob& job, const std::vector<LiveRank>& ranks) {
  std::printf("job %s (launcher %ld), node %d of %d, attempt %d, for %s: %s\n", job.name.c_str(),
              static_cast<long>(job.pid), job.node_rank, job.num_nodes, job.attempt,
              duration_text(seconds_since(job.begin_ns)).c_str(),
              command_text(job.command).c_str());
  std::printf("%4s %8s  %-13s %7s  %-44s %8s  %-10s %9s %9s %8s %7s\n", "rank", "pid", "state",
              "step", "operation", "for", "waits for", "memory", "shared", "cpu", "threads");
  for (const LiveRank& rank : ranks) {
    const RankOperation* operation = operation_of(rank);
    const std::string step = rank.step >= 0 ? std::to_string(rank.step) : "-";
    std::printf("%4d %8ld  %-13s %7s  %-44s %8s  %-10s %9s %9s %8s %7d\n", rank.rank,
                static_cast<long>(rank.pid), std::string(state_of(rank)).c_str(), step.c_str(),
                operation != nullptr ? operation_text(*operation).c_str() : "-",
                operation != nullptr ? seconds_text(operation->seconds).c_str() : "-",
                operation != nullptr ? waiting_text(*operation).c_str() : "-",
                bytes_text(rank.memory_bytes).c_str(), bytes_text(rank.shared_bytes).c_str(),
                seconds_text(rank.cpu_seconds).c_str(), rank.num_threads);
  }
}

nlohmann::ordered_json as_json(const RankOperation& operation) {
  return {{"group", operation.group},
          {"operation", operation.operation},
          {"sequence", operation.sequence},
          {"details", operation.details},
          {"under_way", operation.is_under_way},
          {"seconds", operation.seconds},
          {"waiting_for", operation.waiting_for},
          {"num_waiting_for", operation.num_waiting_for}};
}

nlohmann::ordered_json as_json(const LiveRank& rank, bool with_stacks) {
  nlohmann::ordered_json operations = nlohmann::ordered_json::array();
  for (const RankOperation& operation : rank.operations) operations.push_back(as_json(operation));
  nlohmann::ordered_json object = {
      {"rank", rank.rank},
      {"pid", rank.pid},
      {"state", state_of(rank)},
      {"recorded", rank.has_record},
      {"step", rank.step >= 0 ? nlohmann::ordered_json(rank.step) : nlohmann::ordered_json()},
      {"step_seconds", rank.step_seconds},
      {"operations", operations},
      {"memory_bytes", rank.memory_bytes},
      {"shared_bytes", rank.shared_bytes},
      {"peak_bytes", rank.peak_bytes},
      {"cpu_seconds", rank.cpu_seconds},
      {"threads", rank.num_threads}};
  if (!with_stacks) return object;
  object["stacks"] = nlohmann::ordered_json::array();
  for (const launch::ThreadStack& stack : rank.stacks) {
    object["stacks"].push_back(
        {{"thread", stack.thread}, {"name", stack.name}, {"frames", stack.frames}});
  }
  object["python_stacks"] = rank.python_stacks;
  return object;
}

void print_json(const LiveJob& job, const std::vector<LiveRank>& ranks, bool with_stacks) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const LiveRank& rank : ranks) list.push_back(as_json(rank, with_stacks));
  const nlohmann::ordered_json object = {{"name", job.name},
                                         {"pid", job.pid},
                                         {"seconds", seconds_since(job.begin_ns)},
                                         {"nodes", job.num_nodes},
                                         {"node_rank", job.node_rank},
                                         {"attempt", job.attempt},
                                         {"command", job.command},
                                         {"ranks", list}};
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  std::printf("%s\n", object.dump(2, ' ', false, replace).c_str());
}

std::vector<LiveRank> chosen(std::vector<LiveRank> ranks, const std::vector<int>& wanted) {
  for (const int number : wanted) {
    const bool is_here = std::any_of(ranks.begin(), ranks.end(),
                                     [&](const LiveRank& rank) { return rank.rank == number; });
    if (!is_here) {
      throw UsageError("inspect: rank " + std::to_string(number) + " is not on this host; ranks " +
                       std::to_string(ranks.front().rank) + " to " +
                       std::to_string(ranks.back().rank) + " are");
    }
  }
  if (!wanted.empty()) {
    std::erase_if(ranks, [&](const LiveRank& rank) {
      return std::find(wanted.begin(), wanted.end(), rank.rank) == wanted.end();
    });
  }
  return ranks;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "inspect");
  Words given;
  define_flags(app, given);
  // The job may stand before the flags or behind them.
  SplitWords split = split_words(app, words);
  std::vector<std::string> names;
  while (!split.rest.empty()) {
    names.push_back(split.rest[0]);
    const SplitWords more = split_words(app, {split.rest.begin() + 1, split.rest.end()});
    split.flags.insert(split.flags.end(), more.flags.begin(), more.flags.end());
    split.rest = more.rest;
  }
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (names.size() > 1) throw UsageError("inspect: name one job, not '" + names[1] + "' as well");
  const LiveJob job = find_job(names);
  std::vector<LiveRank> ranks = chosen(launch::look_at_ranks(job), given.ranks);
  if (given.wants_stacks) {
    for (LiveRank& rank : ranks) launch::ask_for_stacks(job, rank);
  }
  if (given.as_json) {
    print_json(job, ranks, given.wants_stacks);
    return launch::kExitOk;
  }
  print_table(job, ranks);
  if (given.wants_stacks) {
    for (const LiveRank& rank : ranks) print_stacks(rank);
  }
  return launch::kExitOk;
}

std::vector<std::string> flags() {
  CLI::App app("", "inspect");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const Verb kInspectVerb{"inspect", "show what each rank of a running job is doing", kHelp, run,
                        flags};

}  // namespace tessera::cli
