#include "tessera/launch/options.h"

#include <glob.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "core/cores.h"

namespace tessera::launch {
namespace {

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

int num_gpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    const std::string_view text(visible);
    if (text.empty() || text == "-1") return 0;
    return static_cast<int>(split(text, ',').size());
  }
  glob_t found{};
  const int status = glob("/dev/nvidia[0-9]*", 0, nullptr, &found);
  const int count = status == 0 ? static_cast<int>(found.gl_pathc) : 0;
  globfree(&found);
  return count;
}

int stream_bits(std::string_view text) {
  if (text.size() == 1 && text[0] >= '0' && text[0] <= '3') return text[0] - '0';
  throw std::invalid_argument("'" + std::string(text) +
                              "' is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)");
}

}  // namespace

std::string Endpoint::text() const {
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

int StreamRule::of(int local_rank) const {
  const auto found = for_local_rank.find(local_rank);
  return found == for_local_rank.end() ? for_all : found->second;
}

bool StreamRule::is_empty() const { return for_all == 0 && for_local_rank.empty(); }

int parse_integer(std::string_view text, int low, int high) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::invalid_argument("'" + std::string(text) + "' is not a whole number");
  }
  if (value < low || value > high) {
    throw std::invalid_argument(std::string(text) + " is not in [" + std::to_string(low) + ", " +
                                std::to_string(high) + "]");
  }
  return value;
}

StreamRule parse_stream_rule(std::string_view text) {
  StreamRule rule;
  if (text.find(':') == std::string_view::npos) {
    rule.for_all = stream_bits(text);
    return rule;
  }
  for (const std::string_view part : split(text, ',')) {
    const size_t colon = part.find(':');
    if (colon == std::string_view::npos) {
      throw std::invalid_argument("'" + std::string(part) + "' is not rank:value");
    }
    const int rank = parse_integer(part.substr(0, colon), 0, 1 << 20);
    rule.for_local_rank[rank] = stream_bits(part.substr(colon + 1));
  }
  return rule;
}

Endpoint parse_endpoint(std::string_view text, std::optional<uint16_t> default_port) {
  Endpoint endpoint;
  std::string_view port;
  if (!text.empty() && text[0] == '[') {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) throw std::invalid_argument("']' is missing");
    endpoint.host = text.substr(1, end - 1);
    text.remove_prefix(end + 1);
    if (!text.empty() && text[0] == ':') port = text.substr(1);
  } else {
    const size_t colon = text.rfind(':');
    endpoint.host = text.substr(0, colon);
    if (colon != std::string_view::npos) port = text.substr(colon + 1);
    if (endpoint.host.find(':') != std::string::npos) {
      throw std::invalid_argument("an IPv6 address needs brackets, as in [::1]:29500");
    }
  }
  if (endpoint.host.empty()) throw std::invalid_argument("'" + std::string(text) + "' has no host");
  if (port.empty()) {
    if (!default_port) throw std::invalid_argument("a port is missing, as in host:29500");
    endpoint.port = *default_port;
  } else {
    endpoint.port = static_cast<uint16_t>(parse_integer(port, 0, 65535));
  }
  return endpoint;
}

std::vector<int> parse_rank_list(std::string_view text) {
  std::vector<int> ranks;
  for (const std::string_view part : split(text, ',')) {
    ranks.push_back(parse_integer(part, 0, 1 << 20));
  }
  return ranks;
}

int parse_rank_count(std::string_view text) {
  if (text == "cpu") return core::cores_left();
  if (text == "gpu" || text == "auto") {
    const int gpus = num_gpus();
    if (gpus > 0) return gpus;
    if (text == "auto") return core::cores_left();
    throw std::invalid_argument("this machine has no GPU; use a number, cpu or auto");
  }
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw std::invalid_argument("'" + std::string(text) + "' is not a number, auto, cpu or gpu");
  }
  if (value < 1) {
    throw std::invalid_argument("a job needs at least 1 rank, not " + std::to_string(value));
  }
  if (value > 4096) {
    throw std::invalid_argument("at most 4096 ranks per host, not " + std::to_string(value));
  }
  return value;
}

std::chrono::milliseconds parse_seconds(std::string_view text) {
  std::string_view number = text;
  if (!number.empty() && number.back() == 's') number.remove_suffix(1);
  double seconds = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), seconds);
  if (error != std::errc() || end != number.data() + number.size() || !std::isfinite(seconds) ||
      seconds < 0 || seconds > 1e6) {
    throw std::invalid_argument("'" + std::string(text) + "' is not a number of seconds");
  }
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

}  // namespace tessera::launch
