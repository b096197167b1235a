#include "report/rank_log.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include <ATen/Functions.h>

#include "tessera/comm/collectives.h"

namespace tessera::workloads::report {
namespace {

using Json = nlohmann::ordered_json;

Json breakdown_of(const core::StepRecorder& recorder, int rank) {
  const core::StepTotals totals = recorder.totals();
  Json phases = Json::object();
  for (std::size_t i = 0; i < core::kNumPhases; ++i) {
    if (totals.phase_seconds[i] == 0) continue;
    phases[std::string(core::name_of(static_cast<core::Phase>(i)))] = {
        {"seconds", totals.phase_seconds[i]}, {"waited", totals.waited_seconds[i]}};
  }
  phases["idle"] = {{"seconds", totals.idle_seconds()}, {"waited", 0.0}};
  Json exposed = Json::array();
  Json data = Json::array();
  for (const core::StepTotals& step : recorder.last_steps()) {
    exposed.push_back(std::llround(1e6 * step.exposed_comm_seconds()));
    data.push_back(
        std::llround(1e6 * step.phase_seconds[static_cast<std::size_t>(core::Phase::kData)]));
  }
  return {{"kind", "breakdown"},
          {"rank", rank},
          {"steps", totals.num_steps},
          {"seconds", totals.seconds},
          {"phases", phases},
          {"exposed_comm_us", exposed},
          {"data_us", data}};
}

// Microseconds of the system's clock; the smallest is taken off when all ranks are together.
Json events_of(const core::StepRecorder& recorder, int rank) {
  Json events = Json::array();
  for (const core::SpanRecord& span : recorder.spans()) {
    events.push_back({{"ph", "X"},
                      {"name", span.name},
                      {"cat", core::name_of(span.phase)},
                      {"pid", rank},
                      {"tid", span.thread},
                      {"ts", span.begin_ns},
                      {"dur", static_cast<double>(span.end_ns - span.begin_ns) / 1e3},
                      {"args", {{"step", span.step + 1}, {"wait", span.is_wait}}}});
    // What a device did is no time of the host's.
    if (span.thread == core::SpanRecord::kDeviceThread) events.back()["args"]["device"] = true;
  }
  return events;
}

Json merged(const std::vector<Json>& ranks) {
  std::int64_t first = INT64_MAX;
  for (const Json& rank : ranks) {
    for (const Json& event : rank) first = std::min(first, event["ts"].get<std::int64_t>());
  }
  Json events = Json::array();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    events.push_back({{"ph", "M"},
                      {"name", "process_name"},
                      {"pid", rank},
                      {"args", {{"name", "rank " + std::to_string(rank)}}}});
    const auto is_device = [](const Json& event) { return event["args"].contains("device"); };
    if (std::any_of(ranks[rank].begin(), ranks[rank].end(), is_device)) {
      events.push_back({{"ph", "M"},
                        {"name", "thread_name"},
                        {"pid", rank},
                        {"tid", core::SpanRecord::kDeviceThread},
                        {"args", {{"name", "GPU"}}}});
    }
    for (Json event : ranks[rank]) {
      event["ts"] = static_cast<double>(event["ts"].get<std::int64_t>() - first) / 1e3;
      events.push_back(std::move(event));
    }
  }
  return {{"traceEvents", events}, {"displayTimeUnit", "ms"}};
}

}  // namespace

std::vector<std::string> gather_texts(const std::string& text, const comm::Group& group) {
  at::Tensor mine = at::empty({static_cast<std::int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(mine.data_ptr(), text.data(), text.size());
  const at::Tensor sizes =
      comm::all_gather(at::full({1}, mine.numel(), at::kLong), group).contiguous();
  const at::Tensor all = comm::all_gather_v(mine, group).contiguous();
  std::vector<std::string> texts;
  const auto* letters = reinterpret_cast<const char*>(all.const_data_ptr<std::uint8_t>());
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto size = static_cast<std::size_t>(sizes.const_data_ptr<std::int64_t>()[rank]);
    texts.emplace_back(letters, size);
    letters += size;
  }
  return texts;
}

std::int64_t peak_memory_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return 1024 * std::strtoll(line.c_str() + 6, nullptr, 10);
  }
  return 0;
}

void write_times(const std::string& folder, const core::StepRecorder& recorder,
                 const comm::Group& group, MetricsFile* metrics) {
  const Json mine = {{"breakdown", breakdown_of(recorder, group.rank())},
                     {"events", events_of(recorder, group.rank())}};
  const std::vector<std::string> texts = gather_texts(mine.dump(), group);
  if (metrics == nullptr) return;
  std::vector<Json> events;
  for (const std::string& text : texts) {
    Json rank = Json::parse(text);
    metrics->add(rank["breakdown"]);
    events.push_back(std::move(rank["events"]));
  }
  write_text(folder + "/" + kTraceFile, merged(events).dump() + "\n");
}

}  // namespace tessera::workloads::report
