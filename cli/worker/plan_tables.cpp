// tessera-worker plan-tables — the part of `tessera plan tables` that needs LibTorch.

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "../plan_failure.h"
#include "../plan_request.h"
#include "../plan_tables_flags.h"
#include "dlrm/from_settings.h"
#include "dlrm/open_log.h"
#include "dlrm/training.h"
#include "report/html.h"
#include "report/run_folder.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/planner.h"
#include "worker/dlrm_words.h"
#include "worker/plan_text.h"
#include "worker/table_list.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

namespace dlrm = workloads::dlrm;
using launch::LaunchError;
using workloads::report::bytes_text;

constexpr const char* kRules[] = {"balanced", "table_wise", "row_wise", "column_wise",
                                  "data_parallel"};

ListedTables tables_of(const PlanTablesWords& words) {
  if (!words.table_list.empty()) return read_table_list(words.table_list);
  const dlrm::OpenedLog log = dlrm::open_log(words.data, log_options(words));
  std::fputs(log.notes.c_str(), stderr);
  ListedTables listed;
  listed.tables = dlrm::tables_of(log.log->schema(), words.embedding_dim);
  for (const dlrm::Feature& feature : log.log->schema().features) {
    // Where bags vary, --bag says how long they are in the mean.
    listed.ids_per_sample.push_back(
        static_cast<double>(feature.bag_size > 0 ? feature.bag_size : words.bag_size));
  }
  return listed;
}

PlanSubjectTables subject_of(const PlanTablesWords& words, const WantedPlan& wanted) {
  PlanSubjectTables subject;
  ListedTables listed = tables_of(words);
  subject.tables = std::move(listed.tables);
  subject.topology = {words.num_ranks, words.num_ranks / words.num_hosts};
  subject.problem = dlrm::problem_of(subject.tables, listed.ids_per_sample, wanted.request);
  if (!words.stats.empty()) dlrm::apply_statistics(words.stats, subject.problem.tables);
  set_search(words, subject.problem);
  subject.speeds_origin = wanted.origin;
  subject.memory = words.memory.empty() ? 0 : bytes_of(words.memory);
  subject.budget = subject.memory * (1 - words.reserve / 100);
  return subject;
}

void cost_it(const PlanSubjectTables& subject, PlanChoice& choice) {
  const std::vector<planner::ShardCost> costs =
      planner::cost_of(subject.problem, dlrm::planner_plan(choice.plan));
  choice.step_seconds = planner::step_seconds(subject.problem, costs);
  const double own = planner::CostModel(subject.problem).own_bytes();
  for (const planner::ShardCost& cost : costs) {
    const planner::Bytes& bytes = cost.bytes;
    choice.costs.push_back(
        {{bytes.weights, bytes.optimizer, bytes.input + bytes.activations + bytes.sort + own},
         cost.seconds});
  }
}

// What is wrong, without the words before it that name the operation.
std::string reason_of(const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  const std::size_t colon = text.find(": ");
  return colon == std::string::npos ? text : text.substr(colon + 2);
}

PlanChoice named_choice(const PlanSubjectTables& subject, const std::string& name) {
  PlanChoice choice;
  choice.sharding = name;
  try {
    choice.plan = dlrm::default_plan(subject.tables, name, subject.topology);
    cost_it(subject, choice);
  } catch (const c10::ValueError& error) {
    choice.obstacle = reason_of(error);
  }
  return choice;
}

// The planner's, and its bound.
PlanChoice searched_choice(const PlanTablesWords& words, PlanSubjectTables& subject) {
  PlanChoice choice;
  choice.sharding = "auto";
  try {
    const planner::PlanResult found = planner::plan(subject.problem);
    subject.bound = found.certificate.seconds;
    choice.plan =
        sharding::plan_from_json(planner::plan_json(found.plan, kModule)).modules.at(kModule);
    cost_it(subject, choice);
  } catch (const planner::PlanError& error) {
    if (dlrm::is_planned(words)) throw plan_failure(error);
    choice.obstacle = error.problem().substr(6);  // "plan: "
  }
  return choice;
}

void choose(const PlanTablesWords& words, PlanSubjectTables& subject) {
  subject.others.push_back(searched_choice(words, subject));
  for (const char* name : kRules) subject.others.push_back(named_choice(subject, name));
  try {
    subject.chosen.plan = dlrm::is_planned(words)
                              ? subject.others[0].plan
                              : plan_of("plan", words, subject.tables, subject.topology);
  } catch (const c10::ValueError& error) {
    throw LaunchError(launch::kExitConfiguration, "plan: " + reason_of(error),
                      words.plan.empty()
                          ? "--sharding " + words.sharding + " cannot cut these tables so"
                          : words.plan + " does not fit these tables and ranks",
                      words.plan.empty() ? "another --sharding, or other --ranks"
                                         : "make it with tessera plan tables --write");
  }
  subject.chosen.sharding =
      words.plan.empty() ? "sharding " + words.sharding : "plan " + words.plan;
  cost_it(subject, subject.chosen);
}

// The largest thing on a rank, as a reason.
std::string largest_on(const PlanSubjectTables& subject, int rank) {
  std::string name;
  double most = -1;
  for (const auto& table : subject.tables) {
    for (const auto& shard : subject.chosen.plan.at(table.name).shards) {
      const double bytes = weight_bytes(table, shard);
      if (shard.rank != rank || bytes <= most) continue;
      most = bytes;
      name = table.name;
    }
  }
  const auto& own = subject.chosen.plan.at(name);
  return "its largest part is " + bytes_text(most) + " of table '" + name + "', which is " +
         std::string(sharding::name_of(own.type));
}

void check_fits(const PlanSubjectTables& subject) {
  if (subject.fits(subject.chosen)) return;
  const auto& costs = subject.chosen.costs;
  const auto largest = std::max_element(
      costs.begin(), costs.end(),
      [](const auto& a, const auto& b) { return a.bytes.total() < b.bytes.total(); });
  const int rank = static_cast<int>(largest - costs.begin());
  const PlanChoice* way_out = nullptr;
  const PlanChoice* smallest = nullptr;
  for (const PlanChoice& other : subject.others) {
    if (!other.obstacle.empty()) continue;
    if (smallest == nullptr || other.largest_rank() < smallest->largest_rank()) smallest = &other;
    const bool is_faster = way_out == nullptr || other.slowest_rank() < way_out->slowest_rank();
    if (subject.fits(other) && is_faster) way_out = &other;
  }
  const std::string advice =
      way_out != nullptr ? "--sharding " + way_out->sharding + ", which needs " +
                               bytes_text(way_out->largest_rank()) + " on its largest rank"
                         : "more --ranks or --memory: no sharding fits, " + smallest->sharding +
                               " comes closest with " + bytes_text(smallest->largest_rank());
  throw LaunchError(launch::kExitConfiguration,
                    "plan: rank " + std::to_string(rank) + " would hold " +
                        bytes_text(largest->bytes.total()) + ", and tables may have " +
                        bytes_text(subject.budget) + " of its " + bytes_text(subject.memory),
                    largest_on(subject, rank), advice);
}

int plan_tables(const std::vector<std::string>& words) {
  CLI::App app("", "plan-tables");
  PlanTablesWords given;
  define_flags(app, given);
  read_flags(app, words);
  const auto fail = [](const LaunchError& error) {
    std::fputs(error.text().c_str(), stderr);
    return error.exit_code();
  };
  const auto bad_file = [&](const std::string& text) {
    return fail({launch::kExitData, text.starts_with("plan: ") ? text : "plan: " + text,
                 "the file does not say what tables there are",
                 "tessera plan tables --help shows what a list holds"});
  };
  try {
    const WantedPlan wanted = wanted_plan(given);
    std::fputs(wanted.known.caution.c_str(), stderr);
    PlanSubjectTables subject = subject_of(given, wanted);
    choose(given, subject);
    check_fits(subject);
    if (!given.write.empty()) {
      workloads::report::write_text(given.write,
                                    sharding::to_json({{{kModule, subject.chosen.plan}}}) + "\n");
    }
    std::fputs(
        given.as_json ? (plan_json(subject).dump() + "\n").c_str() : plan_text(subject).c_str(),
        stdout);
    return launch::kExitOk;
  } catch (const LaunchError& error) {
    return fail(error);
  } catch (const dlrm::DataError& error) {
    return bad_file(error.what());
  } catch (const workloads::report::Error& error) {
    return bad_file(error.what());
  } catch (const planner::PlanError& error) {
    return fail(plan_failure(error));
  } catch (const c10::ValueError& error) {
    return bad_file(error.what_without_backtrace());
  }
}

}  // namespace

const WorkerVerb kPlanTablesVerb{"plan-tables", plan_tables};

}  // namespace tessera::cli
