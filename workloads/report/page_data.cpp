// What the script of the page reads.

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "report/curves.h"
#include "report/page.h"

namespace tessera::workloads::report {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kMaxLanes = 32;
constexpr std::size_t kMaxSpans = 6000;
constexpr std::size_t kMaxRanks = 400;  // of the plan
constexpr std::size_t kMaxTexts = 20;   // the last ones

// Six digits, as the page shows them; JSON has no word for what is not finite.
Json rounded(double value) {
  if (!std::isfinite(value)) return nullptr;
  if (value == std::floor(value) && std::abs(value) < 1e15) return static_cast<std::int64_t>(value);
  const double scale = std::pow(10.0, 6 - std::ceil(std::log10(std::abs(value))));
  return std::isfinite(scale) && scale > 0 ? std::round(value * scale) / scale : value;
}

std::vector<double> column(const std::vector<StepRow>& steps, double StepRow::* value) {
  std::vector<double> values;
  values.reserve(steps.size());
  for (const StepRow& row : steps) values.push_back(row.*value);
  return values;
}

Json series(const RunRecord& run) {
  const auto shown = shown_steps(run.steps);
  Json data{{"step", Json::array()}};
  for (const std::size_t i : shown) data["step"].push_back(run.steps[i].step);
  const auto add = [&](const char* name, const std::vector<double>& values) {
    data[name] = Json::array();
    for (const std::size_t i : shown) data[name].push_back(rounded(values[i]));
  };
  // A fiftieth of the run to both sides, but not less than a few steps.
  const double reach = std::max(4.0, static_cast<double>(run.steps.size()) / 100);
  const auto loss = column(run.steps, &StepRow::loss);
  const auto seconds = column(run.steps, &StepRow::seconds);
  const auto speed = column(run.steps, &StepRow::samples_per_second);
  const auto exposed = column(run.steps, &StepRow::exposed_comm_seconds);
  add("loss", loss);
  add("loss_mean", smooth(loss, reach));
  add("speed", speed);
  add("speed_mean", smooth(speed, reach));
  add("seconds", seconds);
  add("seconds_mean", smooth(seconds, reach / 2));
  add("exposed", exposed);
  add("exposed_mean", smooth(exposed, reach / 2));
  add("learning_rate", column(run.steps, &StepRow::learning_rate));
  return data;
}

Json evaluation(const EvalRow& row) {
  Json data{{"step", row.step}};
  const std::pair<const char*, double> known[] = {{"log_loss", row.log_loss},
                                                  {"auc", row.auc},
                                                  {"normalized_entropy", row.normalized_entropy},
                                                  {"calibration", row.calibration}};
  for (const auto& [name, value] : known) {
    if (std::isfinite(value)) data[name] = rounded(value);
  }
  for (const auto& [name, value] : row.others) data[name] = rounded(value);
  if (row.samples > 0) data["samples"] = row.samples;
  return data;
}

Json table(const Table& table) {
  Json shards = Json::array();
  for (const Shard& shard : table.shards) {
    shards.push_back({{"rank", shard.rank},
                      {"row", shard.row},
                      {"rows", shard.rows},
                      {"column", shard.column},
                      {"columns", shard.columns},
                      {"bytes", rounded(shard.bytes)}});
    if (std::isfinite(shard.traffic)) shards.back()["traffic"] = rounded(shard.traffic);
  }
  return {{"name", table.name},         {"rows", table.rows},
          {"columns", table.columns},   {"bytes", rounded(table.bytes)},
          {"sharding", table.sharding}, {"shards", shards}};
}

Json growth(const GrowthRow& row) {
  Json tables = Json::array();
  for (const GrowthRow::Table& table : row.tables) {
    tables.push_back({{"name", table.name},
                      {"ids", table.ids},
                      {"admitted", table.admitted},
                      {"refused", table.refused},
                      {"evicted", table.evicted},
                      {"hit_rate", rounded(table.hit_rate)},
                      {"bytes", rounded(table.bytes)}});
  }
  return {{"step", row.step}, {"ids", rounded(row.ids)}, {"tables", tables}};
}

Json breakdown(const Breakdown& one) {
  Json phases = Json::object();
  for (const auto& [name, time] : one.phases) phases[name] = {time.seconds, time.waited};
  return {{"rank", one.rank}, {"steps", one.steps}, {"seconds", one.seconds}, {"phases", phases}};
}

Json plan(const RunRecord& run) {
  Json ranks = Json::array();
  for (std::size_t r = 0; r < std::min(kMaxRanks, run.plan->ranks.size()); ++r) {
    ranks.push_back(run.plan->ranks[r]);
  }
  return {{"sharding", run.plan->sharding},
          {"speeds", run.plan->speeds},
          {"seconds", run.plan->seconds},
          {"bound", run.plan->bound},
          {"ranks", ranks},
          {"predicted", run.plan->predicted},
          {"measured", measured_parts(run)}};
}

// A number for every text, in the order of their first use.
class Names {
 public:
  std::size_t operator()(const std::string& name) {
    const auto [found, is_new] = numbers_.try_emplace(name, numbers_.size());
    if (is_new) all.push_back(name);
    return found->second;
  }
  Json all = Json::array();

 private:
  std::map<std::string, std::size_t> numbers_;
};

// Microseconds from the first span on. A step is marked where the last rank begins it.
Json timeline(const RunRecord& run) {
  if (run.spans.empty()) return nullptr;
  const double begin = run.spans.front().begin;
  double end = begin;
  std::map<std::pair<int, int>, std::size_t> lanes;  // rank and thread
  std::map<std::int64_t, std::map<int, double>> first;
  for (const TraceSpan& span : run.spans) {
    end = std::max(end, span.begin + span.duration);
    lanes.try_emplace({span.rank, span.thread}, 0);
    first[span.step].try_emplace(span.rank, span.begin - begin);
  }
  if (!(end > begin)) return nullptr;
  Json shown = Json::array();
  for (auto& [place, number] : lanes) {
    number = shown.size();
    if (number < kMaxLanes)
      shown.push_back({place.first, place.second});
    else
      number = kMaxLanes;
  }
  Names phases;
  Names names;
  Json spans = Json::array();
  for (const TraceSpan& span : run.spans) {
    const std::size_t lane = lanes.at({span.rank, span.thread});
    if (lane == kMaxLanes) continue;
    if (spans.size() == kMaxSpans) break;
    spans.push_back({lane, rounded(span.begin - begin), rounded(span.duration), phases(span.phase),
                     names(span.name), span.step, span.is_wait ? 1 : 0});
  }
  Json marks = Json::array();
  for (const auto& [step, ranks] : first) {
    double last = 0;
    for (const auto& [rank, at] : ranks) last = std::max(last, at);
    marks.push_back({step, rounded(last)});
  }
  return {{"length", end - begin},
          {"phases", phases.all},
          {"names", names.all},
          {"lanes", shown},
          {"spans", spans},
          {"marks", marks},
          {"more", lanes.size() - shown.size()}};
}

}  // namespace

Json page_data(const RunRecord& run) {
  Json data{{"name", run.name},
            {"workload", run.workload},
            {"unit", run.unit},
            {"started", run.started},
            {"ranks", run.num_ranks},
            {"has_ended", run.has_ended},
            {"status", run.status},
            {"steps", run.total_steps},
            {"planned_steps", run.planned_steps},
            {"seconds", rounded(run.total_seconds)},
            {"samples", rounded(run.total_samples)},
            {"resumed", run.resumed},
            {"best_step", run.best_step},
            {"resume", run.resume},
            {"command", run.command},
            {"data", Json::array()},
            {"auc_ceiling", run.auc_ceiling ? rounded(*run.auc_ceiling) : Json(nullptr)},
            {"num_logged", run.steps.size()},
            {"series", series(run)},
            {"evals", Json::array()},
            {"calibration", nullptr},
            {"medians", Json::object()},
            {"memory", run.peak_memory_bytes},
            {"device_memory", run.peak_device_bytes},
            {"breakdowns", Json::array()},
            {"timeline", timeline(run)},
            {"plan", run.plan ? plan(run) : Json(nullptr)},
            {"tables", Json::array()},
            {"growth", Json::array()},
            {"texts", Json::array()},
            {"facts", run.facts},
            {"config", run.config}};
  for (const DataFile& file : run.data) {
    data["data"].push_back({{"path", file.path}, {"bytes", rounded(file.bytes)}});
  }
  for (const EvalRow& row : run.evals) data["evals"].push_back(evaluation(row));
  for (const Breakdown& one : run.breakdowns) data["breakdowns"].push_back(breakdown(one));
  for (const Table& one : run.tables) data["tables"].push_back(table(one));
  for (const GrowthRow& row : run.growth) data["growth"].push_back(growth(row));
  const std::size_t num_texts = std::min(kMaxTexts, run.texts.size());
  for (auto text = run.texts.end() - static_cast<std::ptrdiff_t>(num_texts);
       text != run.texts.end(); ++text) {
    data["texts"].push_back({text->first, text->second});
  }
  if (run.calibration) {
    data["calibration"] = {{"step", run.calibration->step},
                           {"predicted", run.calibration->predicted},
                           {"observed", run.calibration->observed}};
  }
  data["medians"]["seconds"] = rounded(median(column(run.steps, &StepRow::seconds)));
  data["medians"]["samples_per_second"] =
      rounded(median(column(run.steps, &StepRow::samples_per_second)));
  return data;
}

}  // namespace tessera::workloads::report
