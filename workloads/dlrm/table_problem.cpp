#include "dlrm/table_problem.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "report/run_folder.h"
#include "tessera/planner/id_statistics.h"
#include "tessera/planner/plan_error.h"

namespace tessera::workloads::dlrm {
namespace {

struct State {
  const char* optimizer;
  double per_row;
  double per_element;
};
constexpr State kStates[] = {{"sgd", 0, 0},
                             {"rowwise_adagrad", 4, 0},
                             {"adagrad", 0, 4},
                             {"adam", 0, 8},
                             {"partial_rowwise_adam", 4, 4}};

constexpr double kGiB = 1 << 30;

// What `tessera.distributed.planner.Topology` assumes of one, too.
planner::Speeds speeds_of_gpu() {
  planner::Speeds speeds;
  speeds.memory = 897 * kGiB;
  speeds.host = 600 * kGiB;
  speeds.network = 12.5 * kGiB;
  return speeds;
}

std::string text_of(const std::string& path) {
  try {
    return report::read_text(path);
  } catch (const report::Error& error) {
    throw planner::PlanError(planner::PlanErrorKind::kBadProblem,
                             std::string("plan: ") + error.what());
  }
}

}  // namespace

KnownSpeeds known_speeds(const std::string& profile, const planner::Here& here, bool is_on_gpus) {
  KnownSpeeds known;
  if (is_on_gpus && (profile.empty() || profile == "assume")) {
    known.speeds = speeds_of_gpu();
    known.note = "speeds   assumed for GPUs: tessera doctor --profile measures processors";
    return known;
  }
  std::string path = profile.empty() ? planner::profile_path() : profile;
  if (path == "assume" || (profile.empty() && (path.empty() || !std::filesystem::exists(path)))) {
    known.note = "speeds   assumed; tessera doctor --profile measures those of this machine";
    return known;
  }
  const planner::MachineProfile found = planner::profile_from_json(text_of(path));
  const planner::Difference differs = planner::difference(found, here);
  if (differs.is_other_machine && profile.empty() && !planner::is_profile_named()) {
    known.note = "speeds   assumed: " + path + " is of another machine";
    known.caution = "profile  " + path + " was measured " + differs.words +
                    ", so it is not used: tessera doctor --profile measures this machine, "
                    "--profile " +
                    path + " takes it all the same\n";
    return known;
  }
  known.differs = differs.words;
  if (is_on_gpus) {
    known.caution = "profile  " + path + " was measured on " + found.machine +
                    ", and the tables are on GPUs: --profile assume leaves it out\n";
  } else if (!differs.words.empty()) {
    known.caution = "profile  " + path + " was measured " + differs.words +
                    ": tessera doctor --profile measures again\n";
  }
  known.profile = found;
  known.speeds = planner::speeds_of(known.profile);
  known.is_measured = true;
  known.note = "speeds   of " + path + ", measured with " +
               std::to_string(known.profile.num_ranks) + " ranks on " + known.profile.machine;
  if (!known.profile.calibration.run.empty()) {
    known.note += ", calibrated by " + known.profile.calibration.run;
  }
  return known;
}

void apply_statistics(const std::string& path, std::vector<planner::Table>& tables) {
  const auto features = planner::statistics_from_json(text_of(path));
  if (planner::apply(features, tables) > 0) return;
  throw planner::PlanError(planner::PlanErrorKind::kBadProblem,
                           "plan: " + path + " has none of the tables",
                           "it is about " + std::to_string(features.size()) + " others",
                           "tessera data stats on the log of these tables");
}

std::vector<planner::Table> planner_tables(const ClickSchema& schema, std::int64_t embedding_dim,
                                           std::int64_t bag_size) {
  std::vector<planner::Table> tables;
  for (const Feature& feature : schema.features) {
    planner::Table table;
    table.name = feature.name;
    table.rows = feature.num_rows;
    table.dim = feature.dim_or(embedding_dim);
    table.features[0].ids = static_cast<double>(feature.bag_size > 0 ? feature.bag_size : bag_size);
    tables.push_back(std::move(table));
  }
  return tables;
}

planner::Problem table_problem(std::vector<planner::Table> tables, const PlanRequest& request) {
  planner::Problem problem;
  problem.tables = std::move(tables);
  for (const State& state : kStates) {
    if (request.table_optimizer != state.optimizer) continue;
    for (planner::Table& table : problem.tables) {
      table.state_bytes_per_row = state.per_row;
      table.state_bytes_per_element = state.per_element;
      table.has_exact_norms = state.per_row > 0;
    }
  }
  for (const planner::Table& table : problem.tables) {
    problem.rules[table.name].kernels = {planner::Kernel::kFused};
  }
  problem.ranks.assign(static_cast<std::size_t>(request.num_ranks), request.rank);
  problem.ranks_per_host = request.ranks_per_host;
  problem.batch = request.batch;
  problem.reserved_percent = request.reserve;
  return problem;
}

TableMemory host_memory(int ranks_per_host) {
  const double bytes =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  return {false, bytes, ranks_per_host};
}

double memory_of_rank(const TableMemory& memory) {
  const double bytes = memory.bytes / memory.num_ranks;
  return std::max(kGiB, static_cast<double>(static_cast<std::int64_t>(bytes / kGiB)) * kGiB);
}

}  // namespace tessera::workloads::dlrm
