#include <algorithm>
#include <array>
#include <string>
#include <string_view>
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

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// The digits at `place`, which moves behind them, without zeros in front.
std::string_view number_at(std::string_view text, std::size_t& place) {
  while (place < text.size() && text[place] == '0') ++place;
  const std::size_t begin = place;
  while (place < text.size() && is_digit(text[place])) ++place;
  return text.substr(begin, place - begin);
}

// The order in which people count: cat_2 stands before cat_10. Numbers may have any length.
bool stands_before(std::string_view a, std::string_view b) {
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    if (is_digit(a[i]) && is_digit(b[j])) {
      const std::string_view x = number_at(a, i);
      const std::string_view y = number_at(b, j);
      if (x.size() != y.size()) return x.size() < y.size();
      if (x != y) return x < y;
    } else if (a[i] != b[j]) {
      return static_cast<unsigned char>(a[i]) < static_cast<unsigned char>(b[j]);
    } else {
      ++i;
      ++j;
    }
  }
  if (i < a.size() || j < b.size()) return j < b.size();
  return a < b;  // the same but for zeros in front of numbers
}

// What a map of names holds, in that order.
template <class Map>
std::vector<const typename Map::value_type*> in_natural_order(const Map& map) {
  std::vector<const typename Map::value_type*> all;
  for (const auto& one : map) all.push_back(&one);
  std::sort(all.begin(), all.end(),
            [](const auto* a, const auto* b) { return stands_before(a->first, b->first); });
  return all;
}

std::vector<Line> lines_of(const ModulePlan& plan) {
  std::vector<Line> lines = {{"table", "type", "kernel", "rank", "rows", "columns"}};
  for (const auto* one : in_natural_order(plan)) {
    const auto& [table, sharding] = *one;
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
  for (const auto* one : in_natural_order(modules)) {
    const auto& [path, plan] = *one;
    text.append(text.empty() ? "" : "\n");
    text.append(cut(std::string("module '").append(path).append("'"), limit))
        .append("\n")
        .append(table_of(plan, limit));
  }
  return text;
}

}  // namespace tessera::sharding
