// Files of the planner: problems, lists of tables, machine profiles, plans, results with their
// proofs, statistics. Read, or refused by PlanError and nothing else; what was read is written and
// read again as the same.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "listed_tables.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/id_statistics.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/planner/plan_error.h"
#include "tessera/planner/problem.h"
#include "tessera/planner/replan.h"

using namespace tessera::planner;
namespace cli = tessera::cli;

namespace {

template <class Read>
void read_or_refuse(Read read) {
  try {
    read();
  } catch (const PlanError& error) {
    if (error.problem().empty()) std::abort();
  }
}

// Tables of 1000 rows and 16 columns on two ranks.
Problem problem_of(const std::vector<std::string>& names) {
  Problem problem;
  for (const std::string& name : names) {
    Table& table = problem.tables.emplace_back();
    table.name = name;
    table.rows = 1000;
    table.dim = 16;
  }
  problem.ranks.assign(2, {});
  problem.ranks_per_host = 2;
  problem.tries = 64;
  return problem;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read_or_refuse([&] {
    const std::string once = to_json(problem_from_json(text));
    if (to_json(problem_from_json(once)) != once) std::abort();
  });
  read_or_refuse([&] {
    const MachineProfile profile = profile_from_json(text);
    const std::string once = to_json(profile);
    if (to_json(profile_from_json(once)) != once) std::abort();
    // Speeds of whatever was measured are speeds that a problem may have.
    Problem problem;
    problem.tables.emplace_back();
    problem.tables[0].name = "a";
    problem.tables[0].rows = problem.tables[0].dim = 4;
    if (profile.passes.size() > 4 || profile.num_ranks > 8) return;
    for (const Pass& pass : profile.passes) {
      if (pass.tables > 64) return;
    }
    problem.ranks.assign(1, {kNoLimit, speeds_of(profile)});
    check(problem);
  });
  read_or_refuse([&] { plan_from_json(text); });
  read_or_refuse([&] {
    const std::vector<IdStatistics> found = statistics_from_json(text);
    const std::string once = to_json(found);
    if (to_json(statistics_from_json(once)) != once) std::abort();
    // What was counted is something that a problem may have, and that costs can be told of.
    if (found.size() > 4) return;
    Problem problem = problem_of({"a"});
    problem.tables[0].name = found.empty() ? "a" : found[0].name;
    if (apply(found, problem.tables) == 0) return;
    check(problem);
    const Shard whole{0, 0, problem.tables[0].rows, problem.tables[0].dim, 0};
    cost_of(problem, {{problem.tables[0].name, Cut::kTableWise, Kernel::kFused, {whole}}});
  });
  read_or_refuse([&] {
    Problem problem;
    problem.tables = cli::listed_tables(text, "the list");
    check(problem);
  });
  // A result, as --check takes it: of tables that the corpus has, and of whatever is asked.
  read_or_refuse([&] { result_from_json(text); });
  read_or_refuse([&] {
    const Problem problem = problem_of({"a", "b"});
    const PlanResult result = result_from_json(text, problem);
    holds(result.certificate, problem);
    if (summary(problem, result).empty()) std::abort();
    if (explain(problem, result, "a").empty()) std::abort();
  });
  return 0;
}
