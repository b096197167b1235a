#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "tessera/sharding/plan.h"

namespace tessera::sharding {
namespace {

using Line = std::array<std::string, 6>;

// At most `width` bytes, cut between two characters.
std::string cut(const std::string& text, std::size_t width) {
  if (text.size() <= width) return text;
  std::size_t end = width < 2 ? width : width - 2;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
  return text.substr(0, end).append(width < 2 ? 0 : 2, '.');
}

std::string range(std::int64_t begin, std::int64_t count) {
  return std::string("[")
      .append(std::to_string(begin))
      .append(", ")
      .append(std::to_string(begin + count))
      .append(")");
}

std::vector<Line> lines_of(const ModulePlan& plan) {
  std::vector<Line> lines = {{"table", "type", "kernel", "rank", "rows", "columns"}};
  for (const auto& [table, sharding] : plan) {
    Line line = {table, std::string(name_of(sharding.type)), std::string(name_of(sharding.kernel))};
    for (const Shard& shard : sharding.shards) {
      const bool is_on_all = sharding.type == ShardingType::kDataParallel;
      line[3] = is_on_all ? "all" : std::to_string(shard.rank);
      line[4] = range(shard.row, shard.rows);
      line[5] = range(shard.column, shard.columns);
      lines.push_back(line);
      if (is_on_all) break;
      line[0] = line[1] = line[2] = "";
    }
  }
  return lines;
}

std::string table_of(const ModulePlan& plan, std::size_t width) {
  std::vector<Line> lines = lines_of(plan);
  std::array<std::size_t, 6> widths = {};
  std::size_t total = 0;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    for (const Line& line : lines) widths[i] = std::max(widths[i], line[i].size());
    total += widths[i] + 2;  // two spaces before each
  }
  if (total > width) {  // names give way
    const std::size_t others = total - widths[0];
    widths[0] = std::max<std::size_t>(5, width > others ? width - others : 0);
  }
  std::string text;
  for (const Line& line : lines) {
    std::string row;
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string cell = cut(line[i], widths[i]);
      row.append("  ").append(cell).append(widths[i] - cell.size(), ' ');
    }
    row.erase(row.find_last_not_of(' ') + 1);
    text.append(cut(row, width)).append("\n");
  }
  return text;
}

}  // namespace

std::string ShardingPlan::str(int width) const {
  const auto limit = static_cast<std::size_t>(std::max(width, 1));
  if (modules.empty()) return cut("no modules", limit).append("\n");
  std::string text;
  for (const auto& [path, plan] : modules) {
    text.append(text.empty() ? "" : "\n");
    text.append(cut(std::string("module '").append(path).append("'"), limit))
        .append("\n")
        .append(table_of(plan, limit));
  }
  return text;
}

}  // namespace tessera::sharding
