#include "report/run_record.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "report/run_folder.h"

namespace tessera::workloads::report {
namespace {

using Json = nlohmann::ordered_json;

// A number that is not there, or that JSON cannot hold (written as null), is missing.
double number_of(const Json& line, const char* key) {
  const auto found = line.find(key);
  return found != line.end() && found->is_number() ? found->get<double>() : kMissing;
}

std::string text_of(const Json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

void read_facts(const Json& line, const char* key, RunRecord& run) {
  if (!line.contains(key)) return;
  for (const auto& [name, value] : line.at(key).items()) {
    run.facts.emplace_back(name, text_of(value));
  }
}

void read_head(const Json& line, RunRecord& run) {
  run.workload = line.value("workload", "");
  run.started = line.value("started", "");
  run.num_ranks = line.value("ranks", 1);
  run.unit = line.value("unit", "samples");
  run.planned_steps = line.value("planned_steps", std::int64_t{0});
  run.command = line.value("command", "");
  run.data.clear();
  for (const Json& file : line.value("data", Json::array())) {
    run.data.push_back({file.at("path").get<std::string>(), number_of(file, "bytes")});
  }
  const double ceiling = number_of(line, "auc_ceiling");
  if (ceiling == ceiling) run.auc_ceiling = ceiling;
  run.facts.clear();
  read_facts(line, "versions", run);
  read_facts(line, "machine", run);
}

Table read_table(const Json& line) {
  Table table;
  table.name = line.at("name").get<std::string>();
  table.rows = line.at("rows").get<std::int64_t>();
  table.columns = line.at("columns").get<std::int64_t>();
  table.bytes = line.at("bytes").get<double>();
  table.sharding = line.value("sharding", "");
  for (const Json& shard : line.at("shards")) {
    table.shards.push_back({shard.at("rank").get<int>(), shard.at("row").get<std::int64_t>(),
                            shard.at("rows").get<std::int64_t>(),
                            shard.at("column").get<std::int64_t>(),
                            shard.at("columns").get<std::int64_t>(),
                            shard.at("bytes").get<double>(), number_of(shard, "traffic")});
  }
  return table;
}

PlanRow read_plan(const Json& line) {
  PlanRow plan;
  plan.sharding = line.value("sharding", "");
  plan.speeds = line.value("speeds", "");
  plan.seconds = line.at("seconds").get<double>();
  plan.bound = line.at("bound").get<double>();
  plan.ranks = line.at("ranks").get<std::vector<std::map<std::string, double>>>();
  plan.predicted = line.value("predicted", std::map<std::string, double>{});
  plan.calibration = line.value("calibration", std::map<std::string, double>{});
  return plan;
}

Breakdown read_breakdown(const Json& line) {
  Breakdown breakdown;
  breakdown.rank = line.at("rank").get<int>();
  breakdown.steps = line.at("steps").get<std::int64_t>();
  breakdown.seconds = line.at("seconds").get<double>();
  for (const auto& [phase, time] : line.at("phases").items()) {
    breakdown.phases[phase] = {time.at("seconds").get<double>(), time.at("waited").get<double>()};
  }
  return breakdown;
}

EvalRow read_eval(const Json& line) {
  EvalRow row;
  row.step = line.at("step").get<std::int64_t>();
  const std::pair<const char*, double*> known[] = {{"log_loss", &row.log_loss},
                                                   {"auc", &row.auc},
                                                   {"normalized_entropy", &row.normalized_entropy},
                                                   {"calibration", &row.calibration}};
  for (const auto& [name, value] : known) *value = number_of(line, name);
  row.samples = line.value("samples", std::int64_t{0});
  for (const auto& [name, value] : line.items()) {
    const bool is_known = name == "kind" || name == "step" || name == "samples" ||
                          std::any_of(std::begin(known), std::end(known),
                                      [&](const auto& one) { return name == one.first; });
    if (!is_known) row.others.emplace_back(name, number_of(line, name.c_str()));
  }
  return row;
}

GrowthRow read_growth(const Json& line) {
  GrowthRow row;
  row.step = line.at("step").get<std::int64_t>();
  row.ids = line.at("ids").get<double>();
  for (const Json& table : line.value("tables", Json::array())) {
    row.tables.push_back({table.at("name").get<std::string>(), table.at("ids").get<std::int64_t>(),
                          table.value("admitted", std::int64_t{0}),
                          table.value("refused", std::int64_t{0}),
                          table.value("evicted", std::int64_t{0}), table.value("hit_rate", 0.0),
                          table.value("bytes", 0.0)});
  }
  return row;
}

void read_line(const Json& line, RunRecord& run) {
  const std::string kind = line.at("kind").get<std::string>();
  if (kind == "run") {
    read_head(line, run);
  } else if (kind == "table") {
    run.tables.push_back(read_table(line));
  } else if (kind == "plan") {
    run.plan = read_plan(line);
  } else if (kind == "step") {
    run.steps.push_back({line.at("step").get<std::int64_t>(), number_of(line, "loss"),
                         number_of(line, "seconds"), number_of(line, "samples_per_second"),
                         number_of(line, "learning_rate"),
                         number_of(line, "exposed_comm_seconds")});
  } else if (kind == "eval") {
    run.evals.push_back(read_eval(line));
  } else if (kind == "calibration") {
    run.calibration = {line.at("step").get<std::int64_t>(),
                       line.at("predicted").get<std::vector<double>>(),
                       line.at("observed").get<std::vector<double>>()};
  } else if (kind == "resume") {
    run.resumed.push_back(line.at("step").get<std::int64_t>());
    run.planned_steps = line.value("planned_steps", run.planned_steps);
    run.command = line.value("command", run.command);
  } else if (kind == "growth") {
    run.growth.push_back(read_growth(line));
  } else if (kind == "text") {
    run.texts.emplace_back(line.at("step").get<std::int64_t>(), line.at("text").get<std::string>());
  } else if (kind == "breakdown") {
    run.breakdowns.push_back(read_breakdown(line));
  } else if (kind == "end") {
    run.has_ended = true;
    run.total_steps = line.at("steps").get<std::int64_t>();
    run.total_seconds = line.at("seconds").get<double>();
    run.total_samples = line.at("samples").get<double>();
    run.peak_memory_bytes = line.value("peak_memory_bytes", std::vector<double>{});
    run.peak_device_bytes = line.value("peak_device_bytes", std::vector<double>{});
    run.status = line.value("status", std::string("finished"));
    run.best_step = line.value("best_step", std::int64_t{0});
    run.resume = line.value("resume", std::string());
  }  // kinds of later versions are left alone
}

void read_metrics(const std::string& path, RunRecord& run) {
  const std::string text = read_text(path);
  std::size_t begin = 0;
  for (int number = 1; begin < text.size(); ++number) {
    const std::size_t end = text.find('\n', begin);
    const bool is_whole = end != std::string::npos;
    const std::string line = text.substr(begin, is_whole ? end - begin : end);
    begin = is_whole ? end + 1 : text.size();
    if (line.empty()) continue;
    try {
      read_line(Json::parse(line), run);
    } catch (const nlohmann::json::exception& error) {
      if (!is_whole) return;
      throw Error("report: line " + std::to_string(number) + " of " + path +
                  " makes no sense: " + error.what() + ".");
    }
  }
}

void read_trace(const std::string& path, RunRecord& run) {
  try {
    const Json trace = Json::parse(read_text(path));
    for (const Json& event : trace.at("traceEvents")) {
      if (event.value("ph", "") != "X") continue;
      TraceSpan span;
      span.rank = event.at("pid").get<int>();
      span.thread = event.at("tid").get<int>();
      span.name = event.at("name").get<std::string>();
      span.phase = event.value("cat", "");
      span.begin = event.at("ts").get<double>();
      span.duration = event.at("dur").get<double>();
      if (event.contains("args")) {
        span.step = event["args"].value("step", std::int64_t{0});
        span.is_wait = event["args"].value("wait", false);
      }
      run.spans.push_back(std::move(span));
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error("report: " + path + " makes no sense: " + error.what() + ".");
  }
  // A span before those inside it.
  std::stable_sort(run.spans.begin(), run.spans.end(), [](const TraceSpan& a, const TraceSpan& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.duration > b.duration;
  });
}

}  // namespace

RunRecord read_run(const std::string& folder) {
  RunRecord run;
  const std::filesystem::path path(folder);
  auto last = path.lexically_normal();
  if (last.filename().empty()) last = last.parent_path();
  run.name = last.filename().string();
  read_metrics((path / kMetricsFile).string(), run);
  if (std::filesystem::exists(path / kTraceFile)) read_trace((path / kTraceFile).string(), run);
  if (std::filesystem::exists(path / kConfigFile)) {
    run.config = read_text((path / kConfigFile).string());
  }
  std::sort(run.breakdowns.begin(), run.breakdowns.end(),
            [](const Breakdown& a, const Breakdown& b) { return a.rank < b.rank; });
  if (!run.has_ended && !run.steps.empty()) run.total_steps = run.steps.back().step;
  return run;
}

std::map<std::string, double> measured_parts(const RunRecord& run) {
  static const std::map<std::string, std::string> kPartOf = {
      {"input_dist", "links"}, {"output_dist", "links"}, {"lookup", "lookup"},
      {"dense", "dense"},      {"backward", "backward"}, {"all_reduce", "backward"},
      {"optimizer", "other"},  {"data", "other"},        {"other", "other"}};
  std::map<std::string, double> parts;
  for (const Breakdown& breakdown : run.breakdowns) {
    if (breakdown.steps == 0) continue;
    const auto share =
        1.0 / static_cast<double>(breakdown.steps) / static_cast<double>(run.breakdowns.size());
    for (const auto& [phase, time] : breakdown.phases) {
      const auto part = kPartOf.find(phase);
      if (part != kPartOf.end()) parts[part->second] += time.seconds * share;
    }
  }
  return parts;
}

}  // namespace tessera::workloads::report
