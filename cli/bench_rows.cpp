#include "bench_rows.h"

#include <cstdio>
#include <map>

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kPeer = "gloo";
constexpr double kMostOthers = 0.1;
// Below that the caches hold everything and memory is no floor.
constexpr double kFloorBytes = 25e6;

// module/operation/variant/shape
std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    parts.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

std::string time_text(double microseconds) {
  char text[32];
  const bool is_short = microseconds < 1000;
  const double value = is_short ? microseconds : microseconds / 1e3;
  std::snprintf(text, sizeof(text), "%.*f %s", value < 10 ? 2 : 1, value, is_short ? "us" : "ms");
  return text;
}

bool read_row(const Json& line, BenchRow& row, std::string& shape) {
  if (!line.is_object() || !line.contains("name") || !line["name"].is_string()) return false;
  for (const char* key : {"median_us", "p10_us", "p90_us", "bytes"}) {
    if (!line.contains(key) || !line[key].is_number()) return false;
  }
  const auto parts = parts_of(line["name"].get<std::string>());
  if (parts.size() != 4) return false;
  row.line = line;
  row.operation = parts[1];
  row.variant = parts[2];
  shape = parts[1] + "/" + parts[3];
  row.state = line.value("state", "");
  row.bytes = line["bytes"].get<double>();
  row.median_us = line["median_us"].get<double>();
  row.is_disturbed = line.value("others", 0.0) > kMostOthers;
  const double floor = line.value("floor_us", 0.0);
  if (row.bytes >= kFloorBytes && row.median_us > 0) row.floor_share = floor / row.median_us;
  return true;
}

}  // namespace

std::vector<BenchRow> read_bench_rows(const std::string& text) {
  std::vector<BenchRow> rows;
  std::vector<std::string> shapes;
  std::map<std::string, std::map<std::string, double>> peers;  // by shape, then state
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    BenchRow row;
    std::string shape;
    if (text[begin] == '{' &&
        read_row(Json::parse(text.substr(begin, end - begin), nullptr, false), row, shape)) {
      if (row.variant == kPeer) peers[shape][row.state] = row.median_us;
      rows.push_back(std::move(row));
      shapes.push_back(std::move(shape));
    }
    begin = end + 1;
  }
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto found = peers.find(shapes[i]);
    if (found == peers.end() || rows[i].variant == kPeer) continue;
    const auto same = found->second.find(rows[i].state);
    rows[i].peer_us = same != found->second.end() ? same->second : found->second.begin()->second;
  }
  return rows;
}

std::string bench_table(const std::vector<BenchRow>& rows) {
  char text[160];
  std::snprintf(text, sizeof(text), "%-15s %-12s %-5s %11s %9s %9s %9s %9s %6s %5s\n", "operation",
                "engine", "cores", "bytes", "median", "p10", "p90", kPeer, "x gloo", "floor");
  std::string table = text;
  for (const BenchRow& row : rows) {
    if (row.variant == kPeer) continue;
    char ratio[16] = "";
    char share[16] = "";
    if (row.peer_us > 0) std::snprintf(ratio, sizeof(ratio), "%.1f", row.peer_us / row.median_us);
    if (row.floor_share > 0) std::snprintf(share, sizeof(share), "%.0f %%", 100 * row.floor_share);
    std::snprintf(text, sizeof(text), "%-15s %-12s %-5s %11.0f %9s %9s %9s %9s %6s %5s",
                  row.operation.c_str(), row.variant.c_str(),
                  (row.state + (row.is_disturbed ? "!" : "")).c_str(), row.bytes,
                  time_text(row.median_us).c_str(),
                  time_text(row.line["p10_us"].get<double>()).c_str(),
                  time_text(row.line["p90_us"].get<double>()).c_str(),
                  row.peer_us > 0 ? time_text(row.peer_us).c_str() : "", ratio, share);
    std::string line = text;
    line.erase(line.find_last_not_of(' ') + 1);
    table += line + "\n";
  }
  return table;
}

Json bench_json(const std::vector<BenchRow>& rows) {
  Json list = Json::array();
  for (const BenchRow& row : rows) {
    Json line = row.line;
    if (row.peer_us > 0) {
      line["peer_us"] = row.peer_us;
      line["ratio"] = row.peer_us / row.median_us;
    }
    if (row.floor_share > 0) line["floor_share"] = row.floor_share;
    list.push_back(std::move(line));
  }
  return list;
}

}  // namespace tessera::cli
