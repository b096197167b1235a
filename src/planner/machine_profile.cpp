#include "tessera/planner/machine_profile.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "planner/json.h"
#include "tessera/core/version.h"
#include "tessera/planner/plan_error.h"

namespace tessera::planner {
namespace {

using json::Json;
using json::Place;

constexpr double kForwardShare = 1.0 / 3;  // of a layer's operations; backward has two products

struct CurveName {
  const char* key;
  Curve MachineProfile::* curve;
};
constexpr CurveName kCurves[] = {
    {"rows", &MachineProfile::rows},
    {"steps", &MachineProfile::steps},
    {"parts", &MachineProfile::parts},
    {"host", &MachineProfile::host},
    {"network", &MachineProfile::network},
    {"all_reduce", &MachineProfile::all_reduce},
    {"network_all_reduce", &MachineProfile::network_all_reduce},
    {"dense", &MachineProfile::dense},
};

struct PassNumber {
  const char* key;
  double Pass::* number;
};
constexpr PassNumber kPassNumbers[] = {
    {"ids", &Pass::ids},     {"distinct", &Pass::distinct}, {"distinct_here", &Pass::distinct_here},
    {"input", &Pass::input}, {"forward", &Pass::forward},   {"backward", &Pass::backward}};

Pass pass_at(const Place& place) {
  place.check_keys({"cut", "batch", "tables", "rows", "dim", "ids", "distinct", "distinct_here",
                    "input", "forward", "backward"});
  Pass pass;
  pass.cut = cut_of(place["cut"].text());
  pass.batch = place["batch"].whole(1, std::int64_t{1} << 40);
  pass.tables = static_cast<int>(place["tables"].whole(1, 1 << 20));
  pass.rows = place["rows"].whole(1, std::int64_t{1} << 50);
  pass.dim = place["dim"].whole(1, 1 << 20);
  for (const PassNumber& one : kPassNumbers) {
    pass.*(one.number) = place[one.key].number(1e-15, 1e15);
  }
  return pass;
}

Json json_of(const Pass& pass) {
  Json value{{"cut", name_of(pass.cut)},
             {"batch", pass.batch},
             {"tables", pass.tables},
             {"rows", pass.rows},
             {"dim", pass.dim}};
  for (const PassNumber& one : kPassNumbers) value[one.key] = pass.*(one.number);
  return value;
}

Curve curve_at(const Place& place) {
  Curve curve;
  for (std::size_t i = 0; i < place.size(); ++i) {
    const Place point = place[i];
    if (point.size() != 2) point.refuse("is not [size, seconds]");
    const double size = point[std::size_t{0}].number(0, 1e18);
    if (!curve.empty() && size <= curve.back().first) point.refuse("is not larger than the last");
    curve.emplace_back(size, point[std::size_t{1}].number(1e-15, 1e6));
  }
  return curve;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

double seconds_of(const Line& line, double size) { return line.fixed + line.each * size; }

double speed_of(const Line& line, double assumed, double factor) {
  return (line.each > 0 ? std::clamp(1 / line.each, 1.0, 1e18) : assumed) / factor;
}

}  // namespace

Line fit(const Curve& curve) {
  // Normal equations of (fixed + each * x) / y = 1.
  double ss = 0, sx = 0, xx = 0, s = 0, x1 = 0;
  for (const auto& [x, y] : curve) {
    ss += 1 / (y * y);
    sx += x / (y * y);
    xx += x * x / (y * y);
    s += 1 / y;
    x1 += x / y;
  }
  const double determinant = ss * xx - sx * sx;
  if (determinant > 1e-12 * ss * xx) {
    const Line line{(s * xx - x1 * sx) / determinant, (ss * x1 - sx * s) / determinant};
    if (line.fixed >= 0 && line.each >= 0) return line;
    if (line.each < 0) return {ss > 0 ? s / ss : 0, 0};
  }
  return {0, xx > 0 ? x1 / xx : 0};
}

Curve rising(Curve curve) {
  double most = 0;
  for (auto& [size, seconds] : curve) seconds = most = std::max(most, seconds);
  return curve;
}

MachineProfile profile_from_json(std::string_view text) {
  const Json value = json::parse(text, "the profile");
  const Place root(value, "");
  root.check_keys({"kind", "machine", "version", "engine", "ranks", "threads_per_rank", "spread",
                   "left_out", "curves", "passes", "calibration"});
  if (!root.has("kind") || root["kind"].text() != "tessera machine profile") {
    root.refuse("is no profile of tessera doctor --profile");
  }
  MachineProfile profile;
  profile.machine = root["machine"].text();
  profile.version = root["version"].text();
  profile.engine = root["engine"].text();
  profile.num_ranks = static_cast<int>(root["ranks"].whole(1, 1 << 16));
  profile.threads_per_rank = static_cast<int>(root["threads_per_rank"].whole(1, 1 << 16));
  profile.spread = root["spread"].number(0, 1e9);
  if (root.has("left_out")) {
    profile.left_out = static_cast<int>(root["left_out"].whole(0, 1 << 16));
  }
  const Place curves = root["curves"];
  curves.check_keys(
      {"rows", "steps", "parts", "host", "network", "all_reduce", "network_all_reduce", "dense"});
  for (const CurveName& name : kCurves) {
    if (curves.has(name.key)) profile.*(name.curve) = curve_at(curves[name.key]);
  }
  if (root.has("passes")) {
    const Place passes = root["passes"];
    for (std::size_t i = 0; i < passes.size(); ++i) profile.passes.push_back(pass_at(passes[i]));
  }
  if (root.has("calibration")) {
    const Place calibration = root["calibration"];
    calibration.check_keys({"run", "links", "lookup", "step", "dense"});
    profile.calibration.run = calibration["run"].text();
    for (const FactorName& name : kCalibrationFactors) {
      profile.calibration.*(name.factor) = calibration[name.key].number(0.5, 2);
    }
  }
  return profile;
}

std::string to_json(const MachineProfile& profile) {
  Json curves = Json::object();
  for (const CurveName& name : kCurves) {
    if (!(profile.*(name.curve)).empty()) curves[name.key] = profile.*(name.curve);
  }
  Json value{{"kind", "tessera machine profile"}, {"machine", profile.machine},
             {"version", profile.version},        {"engine", profile.engine},
             {"ranks", profile.num_ranks},        {"threads_per_rank", profile.threads_per_rank},
             {"spread", profile.spread},          {"curves", std::move(curves)}};
  if (profile.left_out > 0) value["left_out"] = profile.left_out;
  for (const Pass& pass : profile.passes) value["passes"].push_back(json_of(pass));
  if (!profile.calibration.run.empty()) {
    Json one{{"run", profile.calibration.run}};
    for (const FactorName& name : kCalibrationFactors)
      one[name.key] = profile.calibration.*(name.factor);
    value["calibration"] = std::move(one);
  }
  return value.dump(1);
}

Speeds speeds_of(const MachineProfile& profile) {
  const Calibration& factors = profile.calibration;
  const Speeds assumed;
  Speeds speeds;
  const Line rows = fit(profile.rows);
  speeds.memory = speed_of(rows, assumed.memory, factors.lookup);
  speeds.row_seconds = std::min(1.0, rows.fixed * factors.lookup);
  const Line steps = fit(profile.steps);
  if (!profile.steps.empty()) {
    speeds.step = speed_of(steps, speeds.memory, factors.step);
    speeds.id_seconds = std::min(1.0, steps.fixed * factors.step);
  }
  speeds.part_seconds = std::min(1.0, fit(profile.parts).each * factors.lookup);
  speeds.host = speed_of(fit(profile.host), assumed.host, factors.links);
  speeds.network = speed_of(fit(profile.network), assumed.network, factors.links);
  if (profile.passes.empty()) return speeds;
  // Passes know what surrounds the rows, too; the curves are for what they do not tell.
  speeds = fit(profile.passes, profile.num_ranks, speeds).speeds;
  speeds.memory /= factors.lookup;
  speeds.step /= factors.step;
  speeds.host /= factors.links;
  for (double Speeds::* one : {&Speeds::row_seconds, &Speeds::bag_seconds, &Speeds::part_seconds}) {
    speeds.*one *= factors.lookup;
  }
  for (double Speeds::* one : {&Speeds::sent_seconds, &Speeds::cut_seconds}) {
    speeds.*one *= factors.links;
  }
  for (double Speeds::* one :
       {&Speeds::id_seconds, &Speeds::merge_seconds, &Speeds::merge_byte_seconds}) {
    speeds.*one *= factors.step;
  }
  return speeds;
}

std::vector<std::string> assumed(const MachineProfile& profile) {
  std::vector<std::string> words;
  for (const auto& [curve, word] :
       {std::pair{&profile.rows, "memory"}, std::pair{&profile.host, "links in a host"},
        std::pair{&profile.network, "links between hosts"}}) {
    if (curve->empty()) words.emplace_back(word);
  }
  return words;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(':');
    const std::size_t begin =
        colon == std::string::npos ? colon : line.find_first_not_of(" \t", colon + 1);
    if (begin != std::string::npos) return line.substr(begin);
  }
  utsname system{};
  return uname(&system) == 0 ? system.machine : "";
}

Difference difference(const MachineProfile& profile, const Here& here) {
  const std::string version = std::to_string(kVersionMajor) + "." + std::to_string(kVersionMinor) +
                              "." + std::to_string(kVersionPatch);
  Difference found;
  const auto add = [&](const std::string& there, const std::string& now) {
    found.words += (found.words.empty() ? "" : ", ") + there + " (here " + now + ")";
  };
  const auto ranks = [](int count) {
    return std::to_string(count) + (count == 1 ? " rank" : " ranks");
  };
  found.is_other_machine = profile.machine != here.machine;
  if (found.is_other_machine) add("on " + profile.machine, here.machine);
  if (here.num_ranks > 0 && profile.num_ranks != here.num_ranks) {
    add("with " + ranks(profile.num_ranks), std::to_string(here.num_ranks));
  }
  if (!here.engine.empty() && profile.engine != here.engine) {
    add("over " + profile.engine, here.engine);
  }
  if (profile.version != version) add("by version " + profile.version, version);
  return found;
}

bool is_profile_named() { return !variable("TESSERA_PROFILE").empty(); }

std::string profile_path() {
  if (const std::string given = variable("TESSERA_PROFILE"); !given.empty()) return given;
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) {
    return cache + "/tessera/machine.json";
  }
  const std::string home = variable("HOME");
  return home.empty() ? "" : home + "/.cache/tessera/machine.json";
}

StepTime predict(const MachineProfile& profile, const std::vector<ShardCost>& costs,
                 const DenseLoad& dense) {
  const auto slowest = std::max_element(
      costs.begin(), costs.end(),
      [](const ShardCost& a, const ShardCost& b) { return a.seconds.total() < b.seconds.total(); });
  StepTime time;
  const bool is_alone = costs.size() < 2;
  // The passes have what calls inside a host take.
  const bool has_hosts = static_cast<int>(costs.size()) > profile.num_ranks;
  const double far_call = has_hosts ? fit(profile.network).fixed * profile.calibration.links : 0;
  const double call = is_alone ? 0 : fit(profile.host).fixed * profile.calibration.links;
  const PassFit passes = fit(profile.passes, profile.num_ranks, {});
  const Line layer = fit(profile.dense);
  const double operations =
      profile.calibration.dense * (dense.layers * layer.fixed + layer.each * dense.operations);
  const Curve& all_reduces = has_hosts && !profile.network_all_reduce.empty()
                                 ? profile.network_all_reduce
                                 : profile.all_reduce;
  const double all_reduce =
      is_alone ? 0 : profile.calibration.links * seconds_of(fit(all_reduces), dense.bytes);
  if (slowest != costs.end()) {
    const Seconds& seconds = slowest->seconds;
    const bool is_whole = !profile.passes.empty();
    time.links = seconds.ids + seconds.rows +
                 (is_whole ? passes.input * profile.calibration.links : 2 * call) + 2 * far_call;
    time.lookup = seconds.lookup + passes.forward * profile.calibration.lookup;
    time.gradients = seconds.gradients + (is_whole ? 0 : call) + far_call + all_reduce;
    time.step = seconds.step + passes.backward * profile.calibration.step;
  }
  const bool is_measured = dense.forward > 0;
  time.dense = is_measured ? dense.forward : kForwardShare * operations;
  time.backward = (is_measured ? dense.backward : (1 - kForwardShare) * operations) +
                  time.gradients + time.step;
  time.other = dense.other;
  return time;
}

Calibration calibrate(const std::string& run, const StepTime& predicted, const StepTime& measured,
                      const Calibration& with) {
  // Beside `before`, such that both together are from half to twice.
  const auto factor = [](double is, double should, double before) {
    return should > 0 && is > 0 ? std::clamp(is / should, 0.5 / before, 2.0 / before) : 1.0;
  };
  Calibration found;
  found.run = run;
  // A rank reads its own rows while those of others travel: which of the two it was is not known.
  found.links = found.lookup =
      factor(measured.links + measured.lookup, predicted.links + predicted.lookup, with.links);
  found.dense = factor(measured.dense, predicted.dense, with.dense);
  const double dense_back = predicted.backward - predicted.gradients - predicted.step;
  found.step =
      factor(measured.backward - found.links * predicted.gradients - found.dense * dense_back,
             predicted.step, with.step);
  for (const FactorName& name : kCalibrationFactors) {
    found.*(name.factor) = std::clamp(found.*(name.factor) * with.*(name.factor), 0.5, 2.0);
  }
  return found;
}

}  // namespace tessera::planner
