#include "report/placement_picture.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "report/html.h"

namespace tessera::workloads::report {
namespace {

constexpr std::size_t kMaxPictures = 16;  // the table has all ranks
constexpr double kAspect = 1.25;          // of the fullest rank's picture

struct Held {
  const Table* table;
  const Shard* shard;
};

// The worst ratio of sides if tiles of these areas stand in one row along a side of `length`.
double worst_ratio(double smallest, double largest, double sum, double length) {
  const double thickness = sum / length;
  return std::max(largest / (thickness * thickness), thickness * thickness / smallest);
}

std::vector<std::vector<Held>> shards_by_rank(const RunRecord& run) {
  std::vector<std::vector<Held>> ranks(static_cast<std::size_t>(std::max(1, run.num_ranks)));
  for (const Table& table : run.tables) {
    for (const Shard& shard : table.shards) {
      if (shard.rank < 0) continue;
      const auto rank = static_cast<std::size_t>(shard.rank);
      if (rank >= ranks.size()) ranks.resize(rank + 1);
      ranks[rank].push_back({&table, &shard});
    }
  }
  for (auto& held : ranks) {
    std::stable_sort(held.begin(), held.end(),
                     [](const Held& a, const Held& b) { return a.shard->bytes > b.shard->bytes; });
  }
  return ranks;
}

double bytes_of(const std::vector<Held>& held) {
  return std::accumulate(held.begin(), held.end(), 0.0,
                         [](double sum, const Held& one) { return sum + one.shard->bytes; });
}

std::string style_of(const std::string& sharding) {
  for (const char* known : {"table_wise", "row_wise", "column_wise", "data_parallel"}) {
    if (sharding == known) return std::string("s-") + known;
  }
  return sharding.find("row") != std::string::npos ? "s-row_wise" : "s-column_wise";
}

std::string range_text(std::int64_t first, std::int64_t count) {
  return count == 0 ? std::string("none") : count_text(first) + "–" + count_text(first + count - 1);
}

std::string tile_title(const Held& held) {
  std::string text = held.table->name + ": " + bytes_text(held.shard->bytes);
  if (held.shard->rows != held.table->rows) {
    text += ", rows " + range_text(held.shard->row, held.shard->rows) + " of " +
            count_text(held.table->rows);
  }
  if (held.shard->columns != held.table->columns) {
    text += ", columns " + range_text(held.shard->column, held.shard->columns) + " of " +
            count_text(held.table->columns);
  }
  return text;
}

std::string picture(const std::vector<Held>& held, std::size_t rank, double bytes, double most) {
  std::string html = "<figure><div class=\"room\"><div class=\"tiles\" style=\"height:" +
                     percent(most > 0 ? bytes / most : 0) + "\">";
  std::vector<double> sizes;
  for (const Held& one : held) {
    if (one.shard->bytes > 0) sizes.push_back(one.shard->bytes);
  }
  const double aspect = bytes > 0 ? kAspect * most / bytes : kAspect;
  const std::vector<Tile> tiles = squarify(sizes, aspect);
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    const Tile& tile = tiles[i];
    const bool has_room = tile.width > 0.14 && tile.height * bytes / most > 0.07;
    html += "<div class=\"" + style_of(held[i].table->sharding) +
            "\" style=\"left:" + percent(tile.left) + ";top:" + percent(tile.top) +
            ";width:" + percent(tile.width) + ";height:" + percent(tile.height) + "\" title=\"" +
            escape(tile_title(held[i])) + "\">" +
            (has_room ? "<span>" + escape(held[i].table->name) + "</span>" : "") + "</div>";
  }
  return html + "</div></div><figcaption><b>rank " + std::to_string(rank) + "</b> " +
         escape(bytes_text(bytes)) + "</figcaption></figure>";
}

std::string shard_table(const RunRecord& run) {
  std::string html =
      "<details><summary>Numbers</summary><div class=\"scroll\"><table id=\"placement\"><thead><tr>"
      "<th scope=\"col\">table</th><th scope=\"col\">sharding</th><th scope=\"col\">rank</th>"
      "<th scope=\"col\">rows</th><th scope=\"col\">columns</th><th scope=\"col\">bytes</th>"
      "</tr></thead><tbody>";
  for (const Table& table : run.tables) {
    for (const Shard& shard : table.shards) {
      html += "<tr><th scope=\"row\">" + escape(table.name) + "</th><td class=\"words\">" +
              escape(table.sharding) + "</td><td>" + std::to_string(shard.rank) + "</td><td>" +
              range_text(shard.row, shard.rows) + "</td><td>" +
              range_text(shard.column, shard.columns) + "</td><td>" +
              count_text(static_cast<long long>(shard.bytes)) + "</td></tr>";
    }
  }
  return html + "</tbody></table></div></details>";
}

std::string legend(const RunRecord& run) {
  std::vector<std::string> kinds;
  for (const Table& table : run.tables) {
    if (std::find(kinds.begin(), kinds.end(), table.sharding) == kinds.end()) {
      kinds.push_back(table.sharding);
    }
  }
  std::string html = "<ul class=\"legend\">";
  for (const std::string& kind : kinds) {
    std::string words = kind;
    std::replace(words.begin(), words.end(), '_', ' ');
    html += "<li><i class=\"" + style_of(kind) + "\"></i>" + escape(words) + "</li>";
  }
  return html + "</ul>";
}

}  // namespace

std::vector<Tile> squarify(const std::vector<double>& sizes, double aspect) {
  std::vector<Tile> tiles;
  const double total = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  if (!(total > 0)) return tiles;
  // Worked out in a box of `aspect` by 1, whose area stands for all bytes.
  double left = 0;
  double top = 0;
  double width = aspect;
  double height = 1;
  std::size_t first = 0;
  while (first < sizes.size()) {
    const double length = std::min(width, height);
    double sum = 0;
    double worst = 0;
    std::size_t last = first;
    while (last < sizes.size()) {
      const double area = sizes[last] * aspect / total;
      const double largest = sizes[first] * aspect / total;
      const double ratio = worst_ratio(area, largest, sum + area, length);
      if (last > first && ratio > worst) break;
      worst = ratio;
      sum += area;
      ++last;
    }
    const double thickness = sum / length;
    double along = 0;
    for (std::size_t i = first; i < last; ++i) {
      const double side = sizes[i] * aspect / total / thickness;
      if (width >= height) {
        tiles.push_back({left / aspect, top + along, thickness / aspect, side});
      } else {
        tiles.push_back({(left + along) / aspect, top, side / aspect, thickness});
      }
      along += side;
    }
    if (width >= height) {
      left += thickness;
      width -= thickness;
    } else {
      top += thickness;
      height -= thickness;
    }
    first = last;
  }
  return tiles;
}

std::string placement_section(const RunRecord& run) {
  if (run.tables.empty()) return "";
  const auto ranks = shards_by_rank(run);
  double most = 0;
  double sum = 0;
  for (const auto& held : ranks) {
    most = std::max(most, bytes_of(held));
    sum += bytes_of(held);
  }
  char imbalance[32];
  std::snprintf(imbalance, sizeof(imbalance), "%.2f",
                sum > 0 ? most * static_cast<double>(ranks.size()) / sum : 1.0);
  std::string html = "<section><h2>Tables</h2><p class=\"note\">" +
                     count_text(static_cast<long long>(run.tables.size())) + " tables, " +
                     escape(bytes_text(sum)) + " on " + std::to_string(ranks.size()) +
                     " ranks; the fullest holds " + imbalance +
                     " times the mean. Areas are bytes, on one scale; lines show how a table is "
                     "cut.</p>" +
                     legend(run) + "<div class=\"placement\" aria-hidden=\"true\">";
  for (std::size_t rank = 0; rank < std::min(ranks.size(), kMaxPictures); ++rank) {
    html += picture(ranks[rank], rank, bytes_of(ranks[rank]), most);
  }
  html += "</div>";
  if (ranks.size() > kMaxPictures) {
    html += "<p class=\"note\">" + std::to_string(ranks.size() - kMaxPictures) +
            " more ranks are in the table.</p>";
  }
  return html + shard_table(run) + "</section>";
}

}  // namespace tessera::workloads::report
