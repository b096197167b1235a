// Files of the planner: problems, machine profiles, plans, statistics. Read, or refused by
// PlanError and nothing else; what was read is written and read again as the same.

#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tessera/planner/id_statistics.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/planner/plan_error.h"
#include "tessera/planner/problem.h"
#include "tessera/planner/replan.h"

using namespace tessera::planner;

namespace {

template <class Read>
void read_or_refuse(Read read) {
  try {
    read();
  } catch (const PlanError& error) {
    if (error.problem().empty()) std::abort();
  }
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
  read_or_refuse([&] { statistics_from_json(text); });
  return 0;
}
