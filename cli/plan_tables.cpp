// tessera plan tables — where embedding tables would lie, and what that costs every rank.

#include <filesystem>

#include "data/input.h"
#include "flags.h"
#include "plan_search.h"
#include "plan_subject.h"
#include "plan_tables_flags.h"
#include "report/run_folder.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/machine_profile.h"
#include "usage.h"
#include "worker_program.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera plan tables [flags]

  tessera plan tables --ranks 4 --rows 1000000 --memory 8GB            26 tables: do they fit?
  tessera plan tables --ranks 16 --hosts 2 --table-list tables.json    tables of one's own
  tessera plan tables --config runs/2026-11-15-1/config.toml           the plan of a run
  tessera plan tables --ranks 4 --sharding row_wise --write plan.json  for tessera train dlrm --plan
  tessera plan tables --ranks 16 --search --table-list tables.json     the best plan, with a proof

Shows how each table is cut, what each rank holds, the time of a step in parts, and what the other
ways of cutting would cost. Times are bytes over bandwidth: they compare plans.

ranks
  -n, --ranks N --hosts N   processes (1), and hosts they are spread over evenly (1)
  --memory B --reserve P    memory of a rank, such as 16GB (no limit), and percent of it that
                            tables do not get (15)
  --memory-speed X --host-speed X --network-speed X
                            GB/s of a rank: in memory, to its host, to others (51, 25, 12.5)
  --profile FILE            what tessera doctor --profile measured, instead of these; or assume
tables
  --table-list FILE         JSON: name, rows, dim; dtype, pooling, ids
  --data D --tables N --rows N --bag N --dim N    as in tessera train dlrm
  --stats FILE              ids of the tables, of tessera data stats
plan
  --sharding S              auto, balanced, table_wise, row_wise, column_wise, data_parallel (auto)
  --plan FILE               explain this plan instead
  --search                  find a plan, and prove how far it is at most from the best one
  --explain TABLE           why it lies there, and what the next best way would cost
  --objective O --effort E  sum or phases (sum); low, normal or high (normal)
  --pin TABLE=RANK[,RANK]   the only ranks a table may lie on; may be repeated, as the next two
  --apart T,T --together T,T    tables that never meet on a rank; that lie whole on the same one
  --check FILE              check plan and proof of --search --json
  --previous FILE --max-moved P --steps-left N
                            improve this plan, move at most so much of its bytes (5%), and only
                            what that many steps pay back (moves are free)
  --calibrate RUN           make the profile predict what this run measured
  --batch N                 samples per rank and step (2048)
  --table-optimizer O       sgd, adagrad, rowwise_adagrad, adam, partial_rowwise_adam
output
  --write FILE              the plan as JSON
  --picture FILE            an SVG: ranks beside the bound, their memory, tables on ranks
  --json                    one JSON object
  --config FILE             read flags from a TOML file; --print-config shows the result
Exit codes: 0 good, 2 wrong usage, 65 bad file, 78 impossible. More: docs/planning.md
)";

void check_exists(int code, const std::string& flag, const std::string& path) {
  if (path.empty() || std::filesystem::exists(path)) return;
  throw launch::LaunchError(code, "plan: there is no file " + path, flag + " names it",
                            "name a file, or leave " + flag + " out");
}

// The file that --config names; empty without one.
std::string config_of(const std::vector<std::string>& flags) {
  std::string path;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] == "--config" && i + 1 < flags.size()) path = flags[i + 1];
    if (flags[i].starts_with("--config=")) path = flags[i].substr(9);
  }
  return path;
}

void check_apart(const PlanTablesWords& given, const std::string& config, const std::string& flag,
                 const std::string& out) {
  if (out.empty()) return;
  std::vector<std::string> inputs{given.table_list, given.plan, given.check, given.previous,
                                  given.stats,      given.data, config};
  inputs.push_back(given.profile.empty() ? planner::profile_path() : given.profile);
  inputs.push_back(given.calibrate + "/" + workloads::report::kMetricsFile);
  try {
    workloads::data::check_apart(inputs, out);
  } catch (const workloads::data::DataError& error) {
    throw launch::LaunchError(launch::kExitData, std::string("plan: ") + error.what(),
                              flag + " names what another flag reads", "another " + flag);
  }
}

void check(const PlanTablesWords& given) {
  if (given.steps_left > 0 && given.previous.empty()) {
    throw UsageError("plan: --steps-left is for --previous");
  }
  if (!given.max_moved.empty() && given.previous.empty()) {
    throw UsageError("plan: --max-moved is for --previous");
  }
  if (given.num_ranks % given.num_hosts != 0) {
    throw launch::LaunchError(
        launch::kExitConfiguration,
        "plan: " + std::to_string(given.num_ranks) + " ranks cannot be spread over " +
            std::to_string(given.num_hosts) + " hosts",
        "every host has the same number of ranks", "choose --ranks as a multiple of --hosts");
  }
  check_exists(launch::kExitData, "--table-list", given.table_list);
  check_exists(launch::kExitConfiguration, "--plan", given.plan);
  check_exists(launch::kExitData, "--check", given.check);
  check_exists(launch::kExitData, "--stats", given.stats);
  check_exists(launch::kExitData, "--previous", given.previous);
  check_exists(launch::kExitData, "--calibrate", given.calibrate);
  if (given.profile != "assume") check_exists(launch::kExitData, "--profile", given.profile);
  if (given.data != "synthetic") check_exists(launch::kExitData, "--data", given.data);
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "plan");
  PlanTablesWords given;
  define_flags(app, given);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (!split.rest.empty()) {
    throw UsageError("plan: tables takes flags only, not '" + split.rest[0] + "'");
  }
  if (given.print_config) return print_config(app);
  check(given);
  const std::string config = config_of(split.flags);
  check_apart(given, config, "--write", given.write);
  check_apart(given, config, "--picture", given.picture);
  if (wants_search(given)) return plan_search(given);
  std::vector<std::string> command{"plan-tables"};
  command.insert(command.end(), split.flags.begin(), split.flags.end());
  become_worker("plan", std::move(command));
}

std::vector<std::string> flags() {
  CLI::App app("", "plan");
  PlanTablesWords words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const PlanSubject kPlanTables{"tables", run, flags};

}  // namespace tessera::cli
