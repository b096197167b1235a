// Times the planner on public models, on one core: enumeration, bound, plan and proof together.
//
//   planner/plan/MODEL/RANKS/PROFILE      until the gap is 0.2 % or the tries are used up
//   planner/bound/MODEL/RANKS/PROFILE     enumeration and bound alone; `colossal_different`: no two
//                                         tables alike
// Lines on stderr tell the certified gaps.
//
//   planner_bench [--phases] [--quick]
//
// --quick: colossal on 8 and 64 ranks and MLPerf on 8, once.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>

#include "planner/public_models.h"
#include "support/row.h"
#include "tessera/planner/planner.h"

namespace {

namespace planner = tessera::planner;

std::vector<double> times_of(const std::function<void()>& work, int repeats) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  return times;
}

void print(const std::string& name, const std::function<void()>& work, int repeats) {
  tessera::bench::RowLabel label;
  label.name = name;
  tessera::bench::print_row(label, times_of(work, repeats));
}

}  // namespace

int main(int argc, char** argv) {
  const auto has = [&](const char* flag) {
    return std::any_of(argv + 1, argv + argc,
                       [&](const char* word) { return std::strcmp(word, flag) == 0; });
  };
  const bool is_phases = has("--phases");
  const bool is_quick = has("--quick");
  const int repeats = is_quick ? 1 : 5;
  for (const char* model : {"colossal", "jumbo", "large", "medium", "mlperf", "small", "tiny"}) {
    const bool is_large = std::strcmp(model, "colossal") == 0;
    if (is_quick && !is_large && std::strcmp(model, "mlperf") != 0) continue;
    for (const int ranks : {8, 16, 64, 128}) {
      if (is_quick && (ranks == 16 || ranks == 128 || (ranks == 64 && !is_large))) continue;
      for (const bool is_gpu : {false, true}) {
        planner::Problem problem = planner::models::problem_of(model, ranks, is_gpu);
        if (is_phases) problem.objective = planner::Objective::kPhases;
        const std::string shape =
            std::string(model) + "/" + std::to_string(ranks) + (is_gpu ? "/gpu" : "/cpu");
        planner::PlanResult result;
        print("planner/plan/" + shape, [&] { result = planner::plan(problem); }, repeats);
        std::fprintf(stderr, "%-18s gap %6.2f %% after %d tries, proof %s\n", shape.c_str(),
                     100 * result.gap(), result.tries,
                     planner::holds(result.certificate, problem) ? "holds" : "FAILS");
        if (std::strcmp(model, "colossal") != 0 || ranks != 64) continue;
        print(
            "planner/bound/" + shape, [&] { planner::lower_bound(planner::enumerate(problem)); },
            repeats);
        for (std::size_t t = 0; t < problem.tables.size(); ++t) {
          problem.tables[t].rows += static_cast<std::int64_t>(t);
        }
        print(
            "planner/bound/colossal_different/64" + std::string(is_gpu ? "/gpu" : "/cpu"),
            [&] { planner::lower_bound(planner::enumerate(problem)); }, repeats);
      }
    }
  }
}
