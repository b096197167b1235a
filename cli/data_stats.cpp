#include "data_stats.h"

#include <algorithm>
#include <cstdio>

#include "data/input.h"
#include "dlrm/open_log.h"
#include "flags.h"
#include "report/run_folder.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/id_statistics.h"
#include "usage.h"

namespace tessera::cli {
namespace {

namespace dlrm = workloads::dlrm;
using launch::LaunchError;

constexpr std::string_view kHelp =
    R"(tessera data stats FILE [flags]

  tessera data stats day_0.click                           a line per feature
  tessera data stats day_0.click --write stats.json        for plan tables --stats and train --stats
  tessera data stats day_0.tsv --rows 1000000 --sample 1000000

Reads a log once and counts, for every feature: ids per sample, how many of them are distinct among
so many lookups, and how much of all lookups the hottest ids have. At most 64 MB a feature.

  --write FILE   keep it as JSON
  --sample N     samples to read (10000000); the whole log if it is shorter
  --rows N       of each table, for a text in Criteo's format (100000)
  --json         the JSON on standard output

Exit codes: 0 good, 2 wrong usage, 65 a file is damaged, missing or cannot be written.
More: docs/planner.md
)";

constexpr std::int64_t kBlock = 4096;  // samples
constexpr std::int64_t kEndless = 1'000'000;

std::string text_of(const std::vector<planner::IdStatistics>& features) {
  std::string text;
  char line[160];
  std::snprintf(line, sizeof line, "%-20s %10s %8s %8s %8s %10s %9s %14s\n", "feature", "rows",
                "ids", "p99", "empty", "distinct", "hot 1024", "zipf");
  text += line;
  for (const planner::IdStatistics& one : features) {
    double hot = 0;
    for (const auto& [ids, share] : one.hotness) {
      if (ids <= 1024) hot = share;
    }
    char law[32] = "-";
    if (one.zipf > 0) std::snprintf(law, sizeof law, "%.2f +- %.2f", one.zipf, one.zipf_error);
    std::snprintf(line, sizeof line, "%-20.20s %10lld %8.4g %8.4g %6.1f %% %10.6g %7.1f %% %14s\n",
                  one.name.c_str(), static_cast<long long>(one.rows), one.mean, one.p99,
                  100 * one.empty_share, one.distinct, 100 * hot, law);
    text += line;
  }
  return text;
}

std::vector<planner::IdStatistics> count(const dlrm::ClickLog& log, std::int64_t num_samples) {
  std::vector<planner::IdCounter> counters;
  for (const dlrm::Feature& feature : log.schema().features) {
    counters.emplace_back(feature.name, feature.num_rows);
  }
  dlrm::SampleBlock block;
  for (std::int64_t first = 0; first < num_samples; first += kBlock) {
    const std::int64_t size = std::min(kBlock, num_samples - first);
    log.expect(first + size, std::min(kBlock, num_samples - first - size));
    log.read(first, size, block);
    const std::int64_t* ids = block.ids.data();
    const std::int32_t* length = block.lengths.data();
    for (planner::IdCounter& counter : counters) {
      for (std::int64_t i = 0; i < size; ++i, ++length) {
        counter.add(ids, *length);
        ids += *length;
      }
    }
  }
  std::vector<planner::IdStatistics> found;
  for (const planner::IdCounter& counter : counters) found.push_back(counter.finish());
  return found;
}

struct Words {
  std::string write;
  std::int64_t sample = 10'000'000;
  std::int64_t rows = 100'000;
  bool wants_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  const CLI::Range range(std::int64_t{1}, std::int64_t{1} << 40);
  app.set_help_flag();
  app.add_option("--write", words.write);
  app.add_option("--sample", words.sample)->check(range);
  app.add_option("--rows", words.rows)->check(range);
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

}  // namespace

int data_stats(const std::vector<std::string>& words) {
  CLI::App app("", "data");
  Words given;
  define_flags(app, given);
  const NamesAndFlags split = names_and_flags(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (split.names.size() != 1) {
    throw UsageError("data: name one file, as in tessera data stats FILE");
  }
  dlrm::LogOptions options;
  options.num_rows = given.rows;
  options.unpack = workloads::data::unpacking;
  try {
    if (!given.write.empty()) workloads::data::check_apart(split.names, given.write);
    const dlrm::OpenedLog log = dlrm::open_log(split.names[0], options);
    std::fputs(log.notes.c_str(), stderr);
    const std::int64_t length = log.log->num_samples();
    const auto found = count(*log.log, std::min(given.sample, length < 0 ? kEndless : length));
    const std::string text = planner::to_json(found) + "\n";
    if (!given.write.empty()) workloads::report::write_text(given.write, text);
    std::fputs(given.wants_json ? text.c_str() : text_of(found).c_str(), stdout);
    return launch::kExitOk;
  } catch (const dlrm::DataError& error) {
    throw LaunchError(launch::kExitData, "data: stats " + split.names[0], error.what(),
                      "tessera data --help shows what can be read");
  } catch (const workloads::report::Error& error) {
    throw LaunchError(launch::kExitData, std::string("data: ") + error.what(),
                      "the statistics cannot be written there", "another --write");
  }
}

std::vector<std::string> data_stats_flags() {
  CLI::App app("", "data");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace tessera::cli
