// tessera trace — puts the traces of ranks together, and sums them up.

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "data/input.h"
#include "flags.h"
#include "report/run_folder.h"
#include "report/trace.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

using workloads::report::RankSummary;
using workloads::report::RankTrace;
using workloads::report::SpanGroup;
using Json = nlohmann::ordered_json;

constexpr std::string_view kHelp =
    R"(tessera trace merge|summary [flags] FILE...

  tessera trace summary runs/2026-11-15-1                 where the time of a run's steps went
  tessera trace merge --to all.json rank0.json rank1.json one file, one row per rank
  tessera trace merge --align all_reduce --to all.json a.json b.json
                                                          hosts whose clocks differ

FILE is a trace.json of a run folder, the folder itself, or what torch.profiler exported, one file
per rank. A rank is what the file says of itself, else the number after "rank" in its name, else
its place. merge puts all on one clock; the result opens in Perfetto and chrome://tracing.

summary goes by the busiest thread of every rank. A span's time is without the spans inside it;
waiting is for communication; idle is what no span covers. The slowest rank is the one that is busy
longest: the others wait for it.

  --to PATH                 merge: the file to write
  --align NAME              merge: the first span NAME ends on all ranks at once
  --by phase|name           summary: what is summed up (phase)
  --top N                   summary: only the N largest (20)
  --json                    one JSON object, times in microseconds

Exit codes: 0 good, 2 wrong usage, 65 a file cannot be used. More: docs/report.md
)";

struct TraceWords {
  std::string to;
  std::string align;
  std::string by = "phase";
  int top = 20;
  bool wants_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, TraceWords& words) {
  app.set_help_flag();
  app.add_option("--to", words.to);
  app.add_option("--align", words.align);
  app.add_option("--by", words.by);
  app.add_option("--top", words.top);
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

void print(const Json& answer) {
  std::printf("%s\n", answer.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

// What is merged must not be what is written. Throws DataError.
void check_apart(const std::vector<std::string>& names, const std::string& to) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    const bool is_folder = std::filesystem::is_directory(name);
    files.push_back(is_folder ? name + "/" + workloads::report::kTraceFile : name);
  }
  workloads::data::check_apart(files, to);
}

int merge(const std::vector<RankTrace>& traces, const TraceWords& words) {
  const Json merged = workloads::report::merge_traces(traces, words.align);
  workloads::report::write_text(words.to,
                                merged.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  const std::size_t num_events = merged["traceEvents"].size();
  if (words.wants_json) {
    Json ranks = Json::array();
    for (const RankTrace& trace : traces) ranks.push_back(trace.rank);
    print({{"path", words.to}, {"ranks", ranks}, {"events", num_events}});
  } else {
    std::printf("trace    %s: %zu ranks, %zu events\n", words.to.c_str(), traces.size(),
                num_events);
  }
  return launch::kExitOk;
}

/// One line of the summary, over all ranks.
struct GroupSum {
  std::string name;
  std::int64_t count = 0;
  double total = 0;
  double waited = 0;
};

std::vector<GroupSum> sums_of(const std::vector<RankSummary>& ranks) {
  std::map<std::string, GroupSum> by_name;
  GroupSum idle{"idle"};
  for (const RankSummary& rank : ranks) {
    idle.total += rank.idle;
    for (const auto& [name, time] : rank.groups) {
      GroupSum& sum = by_name[name];
      sum.name = name;
      sum.count += time.count;
      sum.total += time.total;
      sum.waited += time.waited;
    }
  }
  std::vector<GroupSum> sums;
  for (auto& [name, sum] : by_name) sums.push_back(std::move(sum));
  std::sort(sums.begin(), sums.end(), [](const GroupSum& a, const GroupSum& b) {
    return a.total != b.total ? a.total > b.total : a.name < b.name;
  });
  sums.push_back(idle);
  return sums;
}

const RankSummary& slowest(const std::vector<RankSummary>& ranks) {
  return *std::max_element(ranks.begin(), ranks.end(),
                           [](const auto& a, const auto& b) { return a.busy() < b.busy(); });
}

double total_time(const std::vector<RankSummary>& ranks) {
  double total = 0;
  for (const RankSummary& rank : ranks) total += rank.time;
  return total;
}

double mean_busy(const std::vector<RankSummary>& ranks) {
  double sum = 0;
  for (const RankSummary& rank : ranks) sum += rank.busy();
  return sum / static_cast<double>(ranks.size());
}

Json json_of(const std::vector<RankSummary>& ranks, const std::vector<GroupSum>& sums) {
  const double time = total_time(ranks);
  Json answer = {{"steps", ranks[0].num_steps}, {"slowest_rank", slowest(ranks).rank}};
  answer["groups"] = Json::array();
  for (const GroupSum& sum : sums) {
    answer["groups"].push_back({{"name", sum.name},
                                {"count", sum.count},
                                {"total", sum.total},
                                {"mean", sum.total / static_cast<double>(ranks.size())},
                                {"waited", sum.waited},
                                {"share", time > 0 ? sum.total / time : 0}});
  }
  answer["ranks"] = Json::array();
  for (const RankSummary& rank : ranks) {
    Json groups = Json::object();
    for (const auto& [name, span] : rank.groups) {
      groups[name] = {{"count", span.count}, {"total", span.total}, {"waited", span.waited}};
    }
    answer["ranks"].push_back({{"rank", rank.rank},
                               {"time", rank.time},
                               {"busy", rank.busy()},
                               {"waited", rank.waited},
                               {"idle", rank.idle},
                               {"groups", groups}});
  }
  return answer;
}

void print_text(const std::vector<RankSummary>& ranks, const std::vector<GroupSum>& sums,
                const TraceWords& words) {
  const auto num_ranks = static_cast<double>(ranks.size());
  const double time = total_time(ranks);
  const std::int64_t steps = ranks[0].num_steps;
  std::printf("trace    %zu ranks, %s%.1f ms\n", ranks.size(),
              steps == 0 ? "" : (std::to_string(steps) + " steps, ").c_str(),
              time / num_ranks / 1e3);
  std::printf("\n%-32s %8s %12s %12s %7s %7s\n", words.by.c_str(), "spans", "total ms",
              steps == 0 ? "ms/rank" : "ms/step", "share", "waited");
  const double parts = num_ranks * static_cast<double>(std::max<std::int64_t>(steps, 1));
  std::size_t shown = 0;
  for (const GroupSum& sum : sums) {
    if (shown == static_cast<std::size_t>(words.top) && sum.name != "idle") continue;
    ++shown;
    std::string name = sum.name.substr(0, 32);
    std::printf("%-32s %8lld %12.3f %12.3f %5.1f %% %5.1f %%\n", name.c_str(),
                static_cast<long long>(sum.count), sum.total / 1e3, sum.total / parts / 1e3,
                time > 0 ? 100 * sum.total / time : 0, time > 0 ? 100 * sum.waited / time : 0);
  }
  std::printf("\n%-6s %12s %12s %12s %12s\n", "rank", "time ms", "busy ms", "waited ms", "idle ms");
  for (const RankSummary& rank : ranks) {
    std::printf("%-6d %12.3f %12.3f %12.3f %12.3f\n", rank.rank, rank.time / 1e3, rank.busy() / 1e3,
                rank.waited / 1e3, rank.idle / 1e3);
  }
  if (ranks.size() > 1) {
    const RankSummary& last = slowest(ranks);
    const double mean = mean_busy(ranks);
    std::printf("\nslowest  rank %d: busy for %.3f ms, %.1f %% longer than the mean\n", last.rank,
                last.busy() / 1e3, mean > 0 ? 100 * (last.busy() / mean - 1) : 0);
  }
}

int summary(const std::vector<RankTrace>& traces, const TraceWords& words) {
  const auto by = words.by == "name" ? SpanGroup::kName : SpanGroup::kPhase;
  const std::vector<RankSummary> ranks = workloads::report::summarize(traces, by);
  const std::vector<GroupSum> sums = sums_of(ranks);
  if (words.wants_json) {
    print(json_of(ranks, sums));
  } else {
    print_text(ranks, sums, words);
  }
  return launch::kExitOk;
}

void check(const std::string& action, const TraceWords& words) {
  const bool merges = action == "merge";
  if (!merges && action != "summary") {
    throw UsageError("trace: there is no '" + action + "'" +
                     suggestion(action, {"merge", "summary"}));
  }
  if (merges && words.to.empty()) throw UsageError("trace: merge needs --to PATH");
  if (!merges && !words.to.empty()) throw UsageError("trace: --to is for merge");
  if (!merges && !words.align.empty()) throw UsageError("trace: --align is for merge");
  if (words.by != "phase" && words.by != "name") {
    throw UsageError("trace: --by is phase or name, not '" + words.by + "'");
  }
  if (words.top < 1) throw UsageError("trace: --top is 1 or more");
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "trace");
  TraceWords given;
  define_flags(app, given);
  if (words.empty()) throw UsageError("trace: say what to do, as in tessera trace summary FILE");
  const auto [names, flags] = names_and_flags(app, words);
  read_flags(app, flags);
  if (given.wants_help) return print_help(kHelp);
  if (names.empty()) throw UsageError("trace: say what to do, as in tessera trace summary FILE");
  check(names[0], given);
  if (names.size() == 1) {
    throw UsageError("trace: name files or folders, as in tessera trace " + names[0] + " FILE");
  }
  try {
    const std::vector<std::string> files(names.begin() + 1, names.end());
    if (names[0] == "merge") check_apart(files, given.to);
    const auto traces = workloads::report::read_traces(files);
    return names[0] == "merge" ? merge(traces, given) : summary(traces, given);
  } catch (const workloads::data::DataError& error) {
    throw launch::LaunchError(launch::kExitData, std::string("trace: ") + error.what(),
                              "--to names a trace that is merged", "another --to");
  } catch (const workloads::report::Error& error) {
    const bool aligns = !given.align.empty();
    throw launch::LaunchError(launch::kExitData, error.what(),
                              aligns ? "clocks are aligned by a span that every rank has"
                                     : "the files are not traces of the ranks of one job",
                              aligns ? "tessera trace summary --by name FILE lists the spans"
                                     : "name a run folder, or one exported trace per rank");
  }
}

std::vector<std::string> flags() {
  CLI::App app("", "trace");
  TraceWords words;
  define_flags(app, words);
  return long_flags(app);
}

std::map<std::string, std::string> values() { return {{"--by", "phase name"}}; }

}  // namespace

const Verb kTraceVerb{
    "trace", "merge and summarise the traces of ranks", kHelp, run, flags, "merge summary", values};

}  // namespace tessera::cli
