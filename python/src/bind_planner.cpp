#include <array>
#include <chrono>
#include <map>
#include <tuple>

#include "bindings.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/planner/planner.h"

namespace tessera::python {
namespace {

namespace py = pybind11;

std::string name_of(planner::PlanErrorKind kind) {
  switch (kind) {
    case planner::PlanErrorKind::kBadProblem:
      return "bad_problem";
    case planner::PlanErrorKind::kTooLarge:
      return "too_large";
    case planner::PlanErrorKind::kRules:
      return "rules";
    case planner::PlanErrorKind::kBadEvidence:
      return "bad_evidence";
    case planner::PlanErrorKind::kLate:
      return "late";
  }
  return "";
}

// (kind of error or "", text); Python has its own class of errors for this.
template <class Work>
std::pair<std::string, std::string> answer(Work work) {
  const py::gil_scoped_release release;
  try {
    return {"", work()};
  } catch (const planner::PlanError& error) {
    return {name_of(error.kind()), error.what()};
  }
}

using ShardSize = std::tuple<std::int64_t, std::int64_t, int>;  // rows, columns, rank
using TableShards = std::tuple<std::string, std::string, std::string, std::vector<ShardSize>>;
using ShardNumbers = std::array<double, 6>;  // seconds by part, bytes

std::vector<std::vector<ShardNumbers>> shard_costs(const std::string& problem,
                                                   const std::vector<TableShards>& tables) {
  const planner::Problem read = planner::problem_from_json(problem);
  const planner::CostModel model(read);
  std::map<std::string, const planner::Table*> by_name;
  for (const planner::Table& table : read.tables) by_name[table.name] = &table;
  std::vector<std::vector<ShardNumbers>> numbers;
  for (const auto& [name, cut, kernel, shards] : tables) {
    const planner::Table& table = *by_name.at(name);
    const planner::CostModel::TableLoad load = model.load_of(table);
    std::vector<ShardNumbers> own;
    for (const auto& [rows, columns, rank] : shards) {
      if (rank < 0 || rank >= read.num_ranks()) throw py::index_error("there is no such rank");
      const planner::ShardCost cost = model.cost(table, load, planner::cut_of(cut),
                                                 planner::kernel_of(kernel), rows, columns, rank);
      const planner::Seconds& s = cost.seconds;
      own.push_back({s.ids, s.lookup, s.rows, s.gradients, s.step, cost.bytes.total()});
    }
    numbers.push_back(std::move(own));
  }
  return numbers;
}

}  // namespace

void bind_planner(py::module_& module) {
  py::module_ sub = module.def_submodule("planner");
  // At most `seconds`, from which the plan may be the best so far; 0: no limit.
  sub.def(
      "plan",
      [](const std::string& problem, double seconds) {
        return answer([&] {
          using Clock = std::chrono::steady_clock;
          const Clock::time_point begin = Clock::now();
          const planner::Problem read = planner::problem_from_json(problem);
          std::function<bool()> is_late;
          if (seconds > 0) {
            is_late = [&] {
              return std::chrono::duration<double>(Clock::now() - begin).count() > seconds;
            };
          }
          return planner::to_json(read, planner::plan(read, is_late));
        });
      },
      py::arg("problem"), py::arg("seconds") = 0.0);
  sub.def("check", [](const std::string& problem, const std::string& result) {
    return answer([&]() -> std::string {
      const planner::Problem read = planner::problem_from_json(problem);
      const planner::PlanResult given = planner::result_from_json(result);
      planner::check_plan(read, given.plan);
      if (!planner::holds(given.certificate, read)) {
        throw planner::PlanError(planner::PlanErrorKind::kBadEvidence,
                                 "plan: the certificate proves nothing about these tables");
      }
      return "";
    });
  });
  sub.def("shard_costs", &shard_costs);
  sub.def("profile_path", &planner::profile_path);
  sub.def("profile_speeds", [](const std::string& text) {
    try {
      const planner::Speeds speeds = planner::speeds_of(planner::profile_from_json(text));
      std::map<std::string, double> found{{"memory_speed", speeds.memory},
                                          {"host_speed", speeds.host},
                                          {"network_speed", speeds.network},
                                          {"step_speed", speeds.step}};
      for (const auto& [key, seconds] : planner::kSpeedSeconds) found[key] = speeds.*seconds;
      return found;
    } catch (const planner::PlanError& error) {
      throw py::value_error(error.what());
    }
  });
  // Whether it is of another machine, and in words what differs.
  sub.def("profile_difference", [](const std::string& text, int num_ranks,
                                   const std::string& engine) {
    planner::Here here;
    here.num_ranks = num_ranks;
    here.engine = engine;
    const planner::Difference found = planner::difference(planner::profile_from_json(text), here);
    return std::pair(found.is_other_machine, found.words);
  });
  sub.def("text",
          [](const std::string& problem, const std::string& result_text, const std::string& table) {
            return answer([&] {
              const planner::Problem read = planner::problem_from_json(problem);
              const planner::PlanResult result = planner::result_from_json(result_text, read);
              return table.empty()
                         ? planner::summary(read, result) + "\n" + planner::table_text(read, result)
                         : planner::explain(read, result, table);
            });
          });
}

}  // namespace tessera::python
