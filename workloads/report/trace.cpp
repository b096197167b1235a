#include "report/trace.h"

#include <algorithm>
#include <filesystem>
#include <regex>
#include <set>

namespace tessera::workloads::report {
namespace {

using Json = nlohmann::ordered_json;

// A file, before its ranks are known.
struct TraceFile {
  std::string path;
  Json events;
  std::int64_t base_ns = 0;  // its clock begins here
  std::optional<int> rank;   // what it says of itself
};

[[noreturn]] void fail(const std::string& path, const std::string& cause) {
  throw Error("trace: " + path + " " + cause + ".");
}

TraceFile read_file(const std::string& path) {
  const std::string text = read_text(path);
  if (text.starts_with("\x1f\x8b")) fail(path, "is compressed; unpack it with gunzip");
  TraceFile file{path, Json::array(), 0, {}};
  try {
    Json whole = Json::parse(text);
    if (whole.is_object()) {
      file.base_ns = whole.value("baseTimeNanoseconds", std::int64_t{0});
      if (whole.contains("distributedInfo")) file.rank = whole["distributedInfo"].at("rank");
      file.events = std::move(whole.at("traceEvents"));
    } else {
      file.events = std::move(whole);
    }
  } catch (const nlohmann::json::exception& error) {
    fail(path, std::string("is no trace: ") + error.what());
  }
  if (!file.events.is_array()) fail(path, "is no trace: traceEvents is no list");
  return file;
}

std::vector<std::string> files_of(const std::string& path) {
  namespace fs = std::filesystem;
  if (!fs::exists(path)) fail(path, "is not there");
  if (!fs::is_directory(path)) return {path};
  if (fs::exists(fs::path(path) / kTraceFile)) return {(fs::path(path) / kTraceFile).string()};
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".json") found.push_back(entry.path().string());
  }
  if (found.empty()) fail(path, "holds no .json file");
  std::sort(found.begin(), found.end());
  return found;
}

std::string name_of(const Json& event) { return event.value("name", ""); }

std::string key_of(const Json& event, const char* field) {
  const auto found = event.find(field);
  return found == event.end() ? "" : found->dump();
}

std::optional<int> number_after_rank(const std::string& text) {
  static const std::regex kRank("rank[^0-9]?([0-9]{1,9})");
  std::smatch match;
  if (!std::regex_search(text, match, kRank)) return std::nullopt;
  return std::stoi(match[1]);
}

// Processes that are called "rank 3" and so on, as merge_traces calls them.
std::map<std::string, int> ranks_of_processes(const Json& events) {
  std::map<std::string, int> ranks;
  for (const Json& event : events) {
    if (event.value("ph", "") != "M" || name_of(event) != "process_name") continue;
    const std::string name = event.contains("args") ? event["args"].value("name", "") : "";
    const auto rank = number_after_rank(name);
    if (rank && name.starts_with("rank ")) ranks[key_of(event, "pid")] = *rank;
  }
  return ranks;
}

// torch.profiler writes one span more, which stands for the whole recording.
bool is_span(const Json& event) {
  return event.value("ph", "") == "X" && event.contains("ts") && event.contains("dur") &&
         event.value("cat", "") != "Trace";
}

double end_of(const Json& event) { return event["ts"].get<double>() + event["dur"].get<double>(); }

void check_types(const std::string& path, const Json& event) {
  const bool is_wrong = !event.is_object() || (event.contains("ts") && !event["ts"].is_number()) ||
                        (event.contains("dur") && !event["dur"].is_number()) ||
                        (event.contains("name") && !event["name"].is_string()) ||
                        (event.contains("cat") && !event["cat"].is_string()) ||
                        (event.contains("ph") && !event["ph"].is_string()) ||
                        (event.contains("args") && !event["args"].is_object());
  if (is_wrong) fail(path, "has an event that makes no sense: " + event.dump().substr(0, 80));
}

}  // namespace

std::vector<RankTrace> read_traces(const std::vector<std::string>& paths) {
  std::vector<TraceFile> files;
  for (const std::string& path : paths) {
    for (const std::string& file : files_of(path)) files.push_back(read_file(file));
  }
  if (files.empty()) throw Error("trace: there are no files.");
  std::int64_t first = files[0].base_ns;
  for (const TraceFile& file : files) first = std::min(first, file.base_ns);
  std::map<int, RankTrace> ranks;
  for (std::size_t place = 0; place < files.size(); ++place) {
    TraceFile& file = files[place];
    for (const Json& event : file.events) check_types(file.path, event);
    const std::string name = std::filesystem::path(file.path).filename().string();
    const int own = file.rank.value_or(number_after_rank(name).value_or(static_cast<int>(place)));
    const auto processes =
        file.rank ? std::map<std::string, int>() : ranks_of_processes(file.events);
    const double later = static_cast<double>(file.base_ns - first) / 1e3;
    for (Json& event : file.events) {
      if (event.contains("ts")) event["ts"] = event["ts"].get<double>() + later;
      const auto process = processes.find(key_of(event, "pid"));
      const int rank = process == processes.end() ? own : process->second;
      // What belongs to no process of a rank is left out where processes are ranks.
      if (!processes.empty() && process == processes.end()) continue;
      RankTrace& trace = ranks[rank];
      if (trace.path.empty()) trace = {rank, file.path, {}};
      if (trace.path != file.path) {
        throw Error("trace: " + trace.path + " and " + file.path + " are both of rank " +
                    std::to_string(rank) + ".");
      }
      trace.events.push_back(std::move(event));
    }
  }
  std::vector<RankTrace> sorted;
  for (auto& [rank, trace] : ranks) sorted.push_back(std::move(trace));
  if (sorted.empty()) throw Error("trace: " + files[0].path + " holds no events.");
  return sorted;
}

namespace {

double first_end(const RankTrace& trace, const std::string& name) {
  std::optional<double> found;
  for (const Json& event : trace.events) {
    if (is_span(event) && name_of(event) == name) {
      found = found ? std::min(*found, end_of(event)) : end_of(event);
    }
  }
  if (!found) {
    throw Error("trace: rank " + std::to_string(trace.rank) + " has no span called '" + name +
                "' (" + trace.path + ").");
  }
  return *found;
}

// The processes of a rank, that with most span time first.
std::vector<std::string> processes_of(const RankTrace& trace) {
  std::map<std::string, double> time;
  for (const Json& event : trace.events) {
    if (event.value("ph", "") == "M") continue;
    time[key_of(event, "pid")] += is_span(event) ? event["dur"].get<double>() : 0;
  }
  std::vector<std::string> keys;
  for (const auto& [key, total] : time) keys.push_back(key);
  std::stable_sort(keys.begin(), keys.end(),
                   [&](const std::string& a, const std::string& b) { return time[a] > time[b]; });
  return keys;
}

Json metadata(const char* name, std::int64_t process, Json args) {
  return {{"ph", "M"}, {"name", name}, {"pid", process}, {"args", std::move(args)}};
}

}  // namespace

Json merge_traces(const std::vector<RankTrace>& traces, const std::string& align) {
  std::vector<double> shift(traces.size(), 0);
  for (std::size_t i = 0; !align.empty() && i < traces.size(); ++i) {
    shift[i] = first_end(traces[0], align) - first_end(traces[i], align);
  }
  std::optional<double> begin;
  for (std::size_t i = 0; i < traces.size(); ++i) {
    for (const Json& event : traces[i].events) {
      if (!event.contains("ts") || event.value("ph", "") == "M") continue;
      const double at = event["ts"].get<double>() + shift[i];
      begin = begin ? std::min(*begin, at) : at;
    }
  }
  Json events = Json::array();
  std::int64_t next_process = traces.back().rank + 1;  // for what is beside the ranks' own
  for (std::size_t i = 0; i < traces.size(); ++i) {
    const std::string rank = "rank " + std::to_string(traces[i].rank);
    std::map<std::string, std::string> names;
    for (const Json& event : traces[i].events) {
      if (name_of(event) != "process_name" || !event.contains("args")) continue;
      names[key_of(event, "pid")] = event["args"].value("name", "");
    }
    std::map<std::string, std::int64_t> number;
    for (const std::string& key : processes_of(traces[i])) {
      const bool is_own = number.empty();
      number[key] = is_own ? traces[i].rank : next_process++;
      events.push_back(metadata("process_name", number[key],
                                {{"name", is_own ? rank : rank + ": " + names[key]}}));
      events.push_back(metadata("process_sort_index", number[key], {{"sort_index", i}}));
    }
    for (Json event : traces[i].events) {
      const bool is_metadata = event.value("ph", "") == "M";
      const auto process = number.find(key_of(event, "pid"));
      if (process == number.end()) continue;  // metadata of a process without events
      if (is_metadata && name_of(event).starts_with("process_")) continue;
      event["pid"] = process->second;
      if (!is_metadata && event.contains("ts")) {
        event["ts"] = event["ts"].get<double>() + shift[i] - *begin;
      }
      // Arrows and asynchronous spans are told apart by their id: of one rank only.
      if (event.contains("id")) {
        event["id"] = std::to_string(traces[i].rank) + ":" + event["id"].dump();
      }
      events.push_back(std::move(event));
    }
  }
  return {{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}};
}

namespace {

bool is_wait(const Json& event) {
  if (event.contains("args")) {
    const auto said = event["args"].find("wait");
    if (said != event["args"].end() && said->is_boolean()) return said->get<bool>();
  }
  const std::string name = name_of(event);
  return name.starts_with("c10d::") || name.starts_with("gloo:") || name.starts_with("nccl:");
}

using Lane = std::vector<const Json*>;

// Of all threads the one whose spans cover most time.
Lane busiest_lane(const RankTrace& trace) {
  std::map<std::pair<std::string, std::string>, Lane> lanes;
  for (const Json& event : trace.events) {
    // What a device did beside the host is no phase of the host's step.
    const bool is_device = event.contains("args") && event["args"].contains("device");
    if (is_span(event) && !is_device) {
      lanes[{key_of(event, "pid"), key_of(event, "tid")}].push_back(&event);
    }
  }
  Lane busiest;
  double most = -1;
  for (auto& [key, lane] : lanes) {
    std::stable_sort(lane.begin(), lane.end(), [](const Json* a, const Json* b) {
      const double at_a = (*a)["ts"];
      const double at_b = (*b)["ts"];
      return at_a != at_b ? at_a<at_b : (*a)["dur"].get<double>()>(*b)["dur"].get<double>();
    });
    double covered = 0;
    double until = (*lane[0])["ts"];
    for (const Json* event : lane) {
      const double end = end_of(*event);
      covered += std::max(0.0, end - std::max(until, (*event)["ts"].get<double>()));
      until = std::max(until, end);
    }
    if (covered > most) {
      most = covered;
      busiest = lane;
    }
  }
  if (busiest.empty()) {
    throw Error("trace: rank " + std::to_string(trace.rank) + " has no spans (" + trace.path +
                ").");
  }
  return busiest;
}

std::int64_t num_steps(const Lane& lane) {
  std::set<std::string> steps;
  for (const Json* event : lane) {
    const std::string name = name_of(*event);
    if (name.starts_with("ProfilerStep#")) steps.insert(name);
    if (event->contains("args") && (*event)["args"].contains("step")) {
      steps.insert((*event)["args"]["step"].dump());
    }
  }
  return static_cast<std::int64_t>(steps.size());
}

RankSummary summarize_rank(const RankTrace& trace, SpanGroup by) {
  const Lane lane = busiest_lane(trace);
  RankSummary summary;
  summary.rank = trace.rank;
  summary.num_steps = num_steps(lane);
  struct Open {
    double end;
    SpanTime* group;
    bool is_wait;
  };
  std::vector<Open> open;  // spans around the current one, outermost first
  double until = (*lane[0])["ts"];
  const double begin = until;
  // The time up to `end` goes to the innermost span that is open, or is idle.
  const auto advance = [&](double end) {
    while (until < end) {
      while (!open.empty() && open.back().end <= until) open.pop_back();
      if (open.empty()) {
        summary.idle += end - until;
        until = end;
        break;
      }
      const double piece = std::min(end, open.back().end) - until;
      open.back().group->total += piece;
      if (open.back().is_wait) {
        open.back().group->waited += piece;
        summary.waited += piece;
      }
      until += piece;
      if (piece <= 0) open.pop_back();
    }
  };
  double last = begin;
  for (const Json* event : lane) {
    advance((*event)["ts"]);
    while (!open.empty() && open.back().end <= until) open.pop_back();
    const std::string phase = event->value("cat", "");
    SpanTime& group =
        summary.groups[by == SpanGroup::kName || phase.empty() ? name_of(*event) : phase];
    ++group.count;
    open.push_back({end_of(*event), &group, is_wait(*event)});
    last = std::max(last, end_of(*event));
  }
  advance(last);
  summary.time = last - begin;
  return summary;
}

}  // namespace

std::vector<RankSummary> summarize(const std::vector<RankTrace>& traces, SpanGroup by) {
  std::vector<RankSummary> all;
  for (const RankTrace& trace : traces) all.push_back(summarize_rank(trace, by));
  return all;
}

}  // namespace tessera::workloads::report
