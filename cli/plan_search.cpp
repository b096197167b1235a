// tessera plan tables --search — a plan with a proof. No LibTorch, so it answers in milliseconds.

#include "plan_search.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "data/input.h"
#include "dlrm/open_log.h"
#include "dlrm/table_problem.h"
#include "listed_tables.h"
#include "plan_failure.h"
#include "plan_picture.h"
#include "plan_request.h"
#include "planner/json.h"
#include "report/run_folder.h"
#include "report/run_record.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/planner/explain.h"
#include "tessera/planner/planner.h"
#include "tessera/planner/replan.h"
#include "usage.h"

namespace tessera::cli {
namespace {

namespace dlrm = workloads::dlrm;
using launch::LaunchError;
using planner::PlanError;
using planner::PlanErrorKind;

constexpr const char* kModule = "tables";  // of a plan file, as `tessera train dlrm` reads it

std::vector<planner::Table> tables_of(const PlanTablesWords& words) {
  if (!words.table_list.empty()) {
    return listed_tables(workloads::report::read_text(words.table_list), words.table_list);
  }
  dlrm::LogOptions options;
  options.num_tables = words.num_tables;
  options.num_rows = words.num_rows;
  options.bag_size = words.bag_size;
  options.seed = static_cast<std::uint64_t>(words.seed);
  options.unpack = workloads::data::unpacking;
  const dlrm::OpenedLog log = dlrm::open_log(words.data, options);
  std::fputs(log.notes.c_str(), stderr);
  return dlrm::planner_tables(log.log->schema(), words.embedding_dim, words.bag_size);
}

// "users=3" or "users=0,1": the only ranks of a table.
void add_pin(const std::string& text, planner::Problem& problem) {
  const std::size_t equals = text.rfind('=');
  const auto wrong = [&] {
    return UsageError("plan: --pin takes TABLE=RANK or TABLE=RANK,RANK, not '" + text + "'");
  };
  if (equals == std::string::npos || equals == 0) throw wrong();
  std::vector<int>& ranks = problem.rules[text.substr(0, equals)].ranks;
  std::size_t begin = equals + 1;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    if (word.empty() || word.size() > 6 ||
        word.find_first_not_of("0123456789") != std::string::npos) {
      throw wrong();
    }
    ranks.push_back(std::stoi(word));
    begin = end + 1;
  }
}

// "users,items": tables that lie together, or apart.
std::vector<std::string> listed_names(const std::string& flag, const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  if (names.size() < 2 || std::find(names.begin(), names.end(), "") != names.end()) {
    throw UsageError("plan: " + flag + " takes TABLE,TABLE or more of them, not '" + text + "'");
  }
  return names;
}

planner::Problem problem_of(const PlanTablesWords& words, const WantedPlan& wanted) {
  std::vector<planner::Table> tables = tables_of(words);
  if (!words.stats.empty()) dlrm::apply_statistics(words.stats, tables);
  planner::Problem problem = dlrm::table_problem(std::move(tables), wanted.request);
  set_search(words, problem);
  for (const std::string& pin : words.pins) add_pin(pin, problem);
  for (const std::string& list : words.apart) {
    problem.apart.push_back(listed_names("--apart", list));
  }
  for (const std::string& list : words.together) {
    problem.together.push_back(listed_names("--together", list));
  }
  return problem;
}

std::string head_text(const PlanTablesWords& words, const planner::Problem& problem,
                      const WantedPlan& wanted) {
  const planner::Speeds& speeds = wanted.request.rank.speeds;
  double bytes = 0;
  for (const planner::Table& table : problem.tables) {
    bytes += static_cast<double>(table.rows) * static_cast<double>(table.dim) * table.element_bytes;
  }
  char line[256];
  std::snprintf(line, sizeof line,
                "tables   %zu of %s on %d ranks of %d %s, %lld samples per rank\n"
                "speeds   %.3g GB/s in memory, %.3g in a host, %.3g between hosts; %s\n",
                problem.tables.size(), planner::bytes_text(bytes).c_str(), words.num_ranks,
                words.num_hosts, words.num_hosts == 1 ? "host" : "hosts",
                static_cast<long long>(words.batch), speeds.memory / 1e9, speeds.host / 1e9,
                speeds.network / 1e9, wanted.origin.c_str());
  return line;
}

int check_file(const PlanTablesWords& words, const planner::Problem& problem) {
  const planner::PlanResult given =
      planner::result_from_json(workloads::report::read_text(words.check));
  planner::check_plan(problem, given.plan);
  const double seconds = planner::step_seconds(problem, planner::cost_of(problem, given.plan));
  if (!planner::holds(given.certificate, problem)) {
    throw PlanError(
        PlanErrorKind::kBadEvidence,
        "plan: the certificate of " + words.check + " proves nothing about these tables",
        "its prices do not refute what it says they refute");
  }
  std::printf("%s holds: a step of %.4g ms, and no plan can be under %.4g ms (%.2f %%)\n",
              words.check.c_str(), seconds * 1e3, given.certificate.seconds * 1e3,
              100 * (seconds / given.certificate.seconds - 1));
  return launch::kExitOk;
}

// "5%", "0.05": a share.
double share_of(const std::string& text) {
  const bool is_percent = !text.empty() && text.back() == '%';
  double value = -1;
  if (!CLI::detail::lexical_cast(is_percent ? text.substr(0, text.size() - 1) : text, value) ||
      !(value >= 0)) {
    throw UsageError("plan: --max-moved takes a share such as 5%, not '" + text + "'");
  }
  value = is_percent ? value / 100 : value;
  if (value > 1) throw UsageError("plan: --max-moved is at most 100%, not '" + text + "'");
  return value;
}

// "new      3 tables: a, b, c"
std::string names_text(const char* what, const std::vector<std::string>& names) {
  constexpr std::size_t kMost = 3;
  if (names.empty()) return "";
  std::string text = std::string(what) + std::string(9 - std::strlen(what), ' ') +
                     std::to_string(names.size()) + (names.size() == 1 ? " table: " : " tables: ");
  for (std::size_t i = 0; i < std::min(kMost, names.size()); ++i) {
    text += (i == 0 ? "" : ", ") + names[i].substr(0, 24);
  }
  return text + (names.size() > kMost ? ", ..\n" : "\n");
}

std::string moves_text(const planner::Replan& found) {
  constexpr std::size_t kMost = 20;
  char line[200];
  std::snprintf(line, sizeof line,
                "moved    %s of %s (%.2f %%) in %zu moves; without them %.4g ms\n",
                planner::bytes_text(found.moved_bytes).c_str(),
                planner::bytes_text(found.total_bytes).c_str(),
                found.total_bytes > 0 ? 100 * found.moved_bytes / found.total_bytes : 0.0,
                found.moves.size(), found.previous_seconds * 1e3);
  std::string text = line;
  if (const double gain = found.previous_seconds - found.result.seconds;
      !found.moves.empty() && gain > 0) {
    std::snprintf(line, sizeof line,
                  "moving   %.3g s on the busiest rank's links, paid back by %.3g steps\n",
                  found.moving_seconds, std::max(1.0, found.moving_seconds / gain));
    text += line;
  }
  text += names_text("new", found.appeared) + names_text("gone", found.vanished) +
          names_text("changed", found.changed);
  for (std::size_t i = 0; i < std::min(kMost, found.moves.size()); ++i) {
    const planner::Move& move = found.moves[i];
    std::snprintf(line, sizeof line, "  %-20.20s rows [%ld, %ld) columns [%ld, %ld) %d -> %d\n",
                  move.table.c_str(), move.part.row, move.part.row + move.part.rows,
                  move.part.column, move.part.column + move.part.columns, move.from,
                  move.part.rank);
    text += line;
  }
  if (found.moves.size() > kMost) {
    text += "  and " + std::to_string(found.moves.size() - kMost) + " more; --json has all\n";
  }
  return text;
}

planner::json::Json result_json(const planner::Problem& problem, const planner::PlanResult& result,
                                const WantedPlan& wanted) {
  using planner::json::Json;
  Json value = Json::parse(planner::to_json(problem, result));
  value["assumed"] = wanted.assumed;
  value["profile"] = nullptr;
  if (const dlrm::KnownSpeeds& known = wanted.known; known.is_measured) {
    value["profile"] = {{"machine", known.profile.machine}, {"ranks", known.profile.num_ranks},
                        {"engine", known.profile.engine},   {"version", known.profile.version},
                        {"spread", known.profile.spread},   {"differs", known.differs}};
  }
  return value;
}

void add_moves(const planner::Replan& found, planner::json::Json& value) {
  using planner::json::Json;
  Json moves = Json::array();
  for (const planner::Move& move : found.moves) {
    const planner::Shard& part = move.part;
    moves.push_back({{"table", move.table},
                     {"part", {part.row, part.column, part.rows, part.columns, part.rank}},
                     {"from", move.from}});
  }
  value["moves"] = std::move(moves);
  value["moved_bytes"] = found.moved_bytes;
  value["total_bytes"] = found.total_bytes;
  value["previous_seconds"] = found.previous_seconds;
  value["moving_seconds"] = found.moving_seconds;
  value["appeared"] = found.appeared;
  value["vanished"] = found.vanished;
  value["changed"] = found.changed;
}

// Makes the profile predict what a run has measured, and keeps it.
void calibrate(const PlanTablesWords& words) {
  const dlrm::KnownSpeeds known = dlrm::known_speeds(words.profile, {});
  const auto refuse = [&](const std::string& why) {
    return PlanError(PlanErrorKind::kBadProblem,
                     "plan: " + words.calibrate + " cannot calibrate a profile", why,
                     "a run of tessera train dlrm after tessera doctor --profile");
  };
  if (!known.is_measured) throw refuse("there is no profile of this machine");
  const workloads::report::RunRecord run = workloads::report::read_run(words.calibrate);
  const std::map<std::string, double> measured = workloads::report::measured_parts(run);
  if (!run.plan || run.plan->predicted.empty() || measured.empty()) {
    throw refuse("its metrics.jsonl has no prediction, or no step");
  }
  const auto times_of = [](const std::map<std::string, double>& parts) {
    const auto part = [&](const char* name) {
      const auto found = parts.find(name);
      return found == parts.end() ? 0.0 : found->second;
    };
    return planner::StepTime{part("links"),     part("lookup"), part("dense"), part("backward"),
                             part("gradients"), part("step"),   part("other")};
  };
  // What the run was slower by is beside the factors it was predicted with, not those of today.
  planner::Calibration with;
  for (const planner::FactorName& name : planner::kCalibrationFactors) {
    const auto told = run.plan->calibration.find(name.key);
    if (told == run.plan->calibration.end() || !(told->second >= 0.5 && told->second <= 2)) {
      throw refuse("its metrics.jsonl does not say which calibration it was predicted with");
    }
    with.*(name.factor) = told->second;
  }
  const planner::Calibration found =
      planner::calibrate(words.calibrate, times_of(run.plan->predicted), times_of(measured), with);
  planner::MachineProfile profile = known.profile;
  profile.calibration = found;
  const std::string path = words.profile.empty() ? planner::profile_path() : words.profile;
  workloads::report::write_text(path, planner::to_json(profile) + "\n");
  std::fprintf(stderr,
               "calibrated %s: links %.2f, lookup %.2f, step %.2f, dense %.2f times as long\n",
               path.c_str(), found.links, found.lookup, found.step, found.dense);
}

}  // namespace

bool wants_search(const PlanTablesWords& words) {
  const bool is_asked = words.search || !words.explain.empty() || !words.check.empty() ||
                        !words.pins.empty() || !words.apart.empty() || !words.together.empty() ||
                        !words.previous.empty() || !words.calibrate.empty() ||
                        !words.picture.empty();
  if (is_asked && !words.plan.empty()) {
    throw UsageError("plan: --plan explains a plan and --search finds one; give one of them");
  }
  if (is_asked && words.sharding != "auto") {
    throw UsageError("plan: --search chooses how tables are cut; leave --sharding out");
  }
  return is_asked;
}

int plan_search(const PlanTablesWords& words) {
  try {
    if (!words.calibrate.empty()) calibrate(words);
    const WantedPlan wanted = wanted_plan(words);
    std::fputs(wanted.known.caution.c_str(), stderr);
    const planner::Problem problem = problem_of(words, wanted);
    if (!words.check.empty()) return check_file(words, problem);
    planner::Replan again;
    if (!words.previous.empty()) {
      const planner::Plan previous =
          planner::plan_from_json(workloads::report::read_text(words.previous));
      again = planner::replan(problem, previous,
                              share_of(words.max_moved.empty() ? "5%" : words.max_moved),
                              words.steps_left);
    }
    const planner::PlanResult result =
        words.previous.empty() ? planner::plan(problem) : again.result;
    if (!words.write.empty()) {
      workloads::report::write_text(words.write, planner::plan_json(result.plan, kModule) + "\n");
    }
    if (!words.picture.empty()) {
      workloads::report::write_text(words.picture, plan_picture(problem, result));
    }
    std::string text;
    if (words.as_json) {
      planner::json::Json value = result_json(problem, result, wanted);
      if (!words.previous.empty()) add_moves(again, value);
      text = value.dump(1) + "\n";
    } else if (!words.explain.empty()) {
      text = planner::explain(problem, result, words.explain);
    } else {
      text = head_text(words, problem, wanted) + planner::summary(problem, result) +
             (words.previous.empty() ? "" : moves_text(again)) + "\n" +
             planner::table_text(problem, result);
    }
    std::fputs(text.c_str(), stdout);
    return launch::kExitOk;
  } catch (const PlanError& error) {
    throw plan_failure(error);
  } catch (const dlrm::DataError& error) {
    throw LaunchError(launch::kExitData, std::string("plan: ") + error.what(), "--data names it",
                      "tessera data show FILE");
  } catch (const workloads::report::Error& error) {
    throw LaunchError(launch::kExitData, std::string("plan: ") + error.what(),
                      "the file cannot be read or written", "another file");
  }
}

}  // namespace tessera::cli
