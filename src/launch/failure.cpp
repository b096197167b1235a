#include "tessera/launch/failure.h"

#include <algorithm>
#include <fstream>
#include <tuple>

#include <nlohmann/json.hpp>

#include "tessera/launch/exit_code.h"

namespace tessera::launch {
namespace {

using Json = nlohmann::json;

constexpr std::streamoff kLargestErrorFile = 4 << 20;

std::string string_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return "";
  return found->is_string() ? found->get<std::string>() : found->dump();
}

int64_t integer_at(const Json& object, const char* key) {
  try {
    return std::stoll(string_at(object, key));
  } catch (const std::exception&) {
    return 0;
  }
}

// When the failure happened, as well as can be told. Whole-second timestamps are rounded down by
// their writers, which would put a consequence before its cause; such a failure counts from the
// end of that second, but not later than the end of its process.
int64_t moment_of(const RankFailure& failure) {
  if (failure.error_ns <= 0) return failure.ended_ns;
  constexpr int64_t kSecond = 1'000'000'000;
  if (failure.error_ns % kSecond != 0) return failure.error_ns;
  return std::min(failure.ended_ns, failure.error_ns + kSecond - 1);
}

bool reports_a_peer(const RankFailure& failure) {
  if (failure.has_error_file) return failure.is_secondary;
  return failure.rank >= 0 && failure.signal_number == 0 && failure.exit_code == kExitLostPeer;
}

}  // namespace

bool read_error_file(const std::string& path, RankFailure& failure) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file || file.tellg() > kLargestErrorFile || file.tellg() <= 0) return false;
  std::string text(static_cast<size_t>(file.tellg()), '\0');
  file.seekg(0);
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size()))) return false;
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("message")) return false;
  const Json& message = root["message"];
  if (message.is_string()) {
    failure.message = message.get<std::string>();
  } else if (message.is_object()) {
    failure.message = string_at(message, "message");
    const auto extra = message.find("extraInfo");
    if (extra != message.end() && extra->is_object()) {
      failure.callstack = string_at(*extra, "py_callstack");
      failure.is_secondary = string_at(*extra, "secondary") == "true";
      failure.error_ns = integer_at(*extra, "timestamp_ns");
      if (failure.error_ns == 0) failure.error_ns = integer_at(*extra, "timestamp") * 1'000'000'000;
    }
  } else {
    return false;
  }
  failure.has_error_file = true;
  failure.error_file = path;
  return true;
}

size_t root_cause(const std::vector<RankFailure>& failures) {
  const auto key = [](const RankFailure& failure) {
    // A rank that only followed the launcher's order to stop is nobody's cause.
    const bool only_obeyed = failure.was_stopped && !failure.has_error_file;
    return std::tuple(only_obeyed, reports_a_peer(failure), moment_of(failure), failure.order);
  };
  const auto first =
      std::min_element(failures.begin(), failures.end(),
                       [&](const RankFailure& a, const RankFailure& b) { return key(a) < key(b); });
  return static_cast<size_t>(first - failures.begin());
}

int exit_code_of(const RankFailure& failure) {
  if (failure.signal_number == 0) return failure.exit_code;
  // It had reported its error and was on its way out when the launcher's signal came.
  if (failure.was_stopped && failure.has_error_file) return 1;
  return exit_code_of_signal(failure.signal_number);
}

std::string failures_to_json(const std::vector<RankFailure>& failures) {
  Json list = Json::array();
  for (const RankFailure& failure : failures) {
    list.push_back({{"rank", failure.rank},
                    {"node", failure.node},
                    {"host", failure.host},
                    {"pid", failure.pid},
                    {"exit_code", failure.exit_code},
                    {"signal", failure.signal_number},
                    {"ended_ns", failure.ended_ns},
                    {"order", failure.order},
                    {"was_stopped", failure.was_stopped},
                    {"has_error_file", failure.has_error_file},
                    {"error_ns", failure.error_ns},
                    {"secondary", failure.is_secondary},
                    {"message", failure.message.substr(0, 4096)},
                    {"callstack", failure.callstack.substr(0, 16384)},
                    {"error_file", failure.error_file},
                    {"tail", failure.tail}});
  }
  return list.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<RankFailure> failures_from_json(const std::string& text) {
  std::vector<RankFailure> failures;
  for (const Json& entry : Json::parse(text)) {
    RankFailure& failure = failures.emplace_back();
    failure.rank = entry.at("rank");
    failure.node = entry.at("node");
    failure.host = entry.at("host");
    failure.pid = entry.at("pid");
    failure.exit_code = entry.at("exit_code");
    failure.signal_number = entry.at("signal");
    failure.ended_ns = entry.at("ended_ns");
    failure.order = entry.at("order");
    failure.was_stopped = entry.at("was_stopped");
    failure.has_error_file = entry.at("has_error_file");
    failure.error_ns = entry.at("error_ns");
    failure.is_secondary = entry.at("secondary");
    failure.message = entry.at("message");
    failure.callstack = entry.at("callstack");
    failure.error_file = entry.at("error_file");
    failure.tail = entry.at("tail");
  }
  return failures;
}

std::string format_report_json(const std::vector<RankFailure>& failures,
                               const ReportContext& context) {
  const Json list = Json::parse(failures_to_json(failures));
  const Json report = {{"root_cause", list[root_cause(failures)]},
                       {"failures", list},
                       {"world_size", context.world_size},
                       {"attempt", context.attempt},
                       {"max_restarts", context.max_restarts},
                       {"memory_kill_seen", context.memory_kill_seen},
                       {"exit_code", exit_code_of(failures[root_cause(failures)])}};
  return report.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::launch
