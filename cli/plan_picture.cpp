#include "plan_picture.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <numeric>

#include "tessera/planner/explain.h"

namespace tessera::cli {
namespace {

constexpr double kLeft = 130;
constexpr double kWidth = 760;
constexpr double kHeight = 180;
constexpr double kRow = 12;
constexpr std::size_t kManyRanks = 128;
constexpr std::size_t kMostTables = 64;

constexpr const char* kColors[] = {"#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2"};

[[gnu::format(printf, 1, 2)]] std::string text_of(const char* format, ...) {
  char text[512];
  va_list words;
  va_start(words, format);
  std::vsnprintf(text, sizeof text, format, words);
  va_end(words);
  return text;
}

std::string escaped(const std::string& text) {
  std::string safe;
  for (const char one : text) {
    const auto code = static_cast<unsigned char>(one);
    if (one == '<')
      safe += "&lt;";
    else if (one == '>')
      safe += "&gt;";
    else if (one == '&')
      safe += "&amp;";
    else if (one == '"')
      safe += "&quot;";
    else
      safe += code < 0x20 ? ' ' : one;
  }
  return safe;
}

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return text_of("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor) + escaped(text) +
         "</text>\n";
}

std::string box(double x, double y, double width, double height, const char* color,
                double opacity = 1) {
  if (width <= 0 || height <= 0) return "";
  return text_of(
      "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\" "
      "fill-opacity=\"%.3f\"/>\n",
      x, y, width, height, color, opacity);
}

struct Bars {
  std::string title;
  std::vector<std::string> names;          // of the parts
  std::vector<std::vector<double>> parts;  // [rank][part]
  double line = 0;                         // 0: none
  std::string line_name;
};

std::string bars_text(const Bars& bars, const std::vector<std::size_t>& order, double top) {
  double most = bars.line;
  for (const auto& parts : bars.parts) {
    most = std::max(most, std::accumulate(parts.begin(), parts.end(), 0.0));
  }
  most = most > 0 ? 1.05 * most : 1;
  std::string text = label(kLeft, top - 8, "start", bars.title);
  for (std::size_t i = 0; i < bars.names.size(); ++i) {
    const double y = top + 14 * static_cast<double>(i);
    text += box(8, y, 10, 10, kColors[i]) + label(22, y + 9, "start", bars.names[i]);
  }
  const double step = kWidth / static_cast<double>(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    double y = top + kHeight;
    for (std::size_t k = 0; k < bars.names.size(); ++k) {
      const double height = bars.parts[order[i]][k] / most * kHeight;
      y -= height;
      text += box(kLeft + step * static_cast<double>(i), y, step * (step > 3 ? 0.85 : 1), height,
                  kColors[k]);
    }
  }
  if (bars.line > 0) {
    const double y = top + kHeight * (1 - bars.line / most);
    text += text_of("<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.2f\" y2=\"%.2f\" stroke=\"#000\"/>\n",
                    kLeft, kLeft + kWidth, y, y);
    text += label(kLeft + kWidth, y - 3, "end", bars.line_name);
  }
  return text;
}

}  // namespace

std::string plan_picture(const planner::Problem& problem, const planner::PlanResult& result) {
  const std::size_t world = result.per_rank.size();
  std::vector<std::size_t> order(world);
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (world > kManyRanks) {
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return result.per_rank[a].seconds.total() > result.per_rank[b].seconds.total();
    });
  }
  const std::string ranks = world > kManyRanks ? "ranks in order of their load" : "ranks in order";
  Bars times{
      "seconds of a step, " + ranks, {"ids", "lookup", "rows", "gradients", "step"}, {}, 0, ""};
  Bars bytes{
      "bytes, " + ranks, {"weights", "optimizer", "input", "activations", "sort"}, {}, 0, ""};
  for (std::size_t r = 0; r < world; ++r) {
    const auto& [seconds, held] = result.per_rank[r];
    times.parts.push_back(
        {seconds.ids, seconds.lookup, seconds.rows, seconds.gradients, seconds.step});
    bytes.parts.push_back({held.weights, held.optimizer, held.input, held.activations, held.sort});
  }
  times.line = result.certificate.seconds;
  times.line_name = text_of("no plan can be under %.4g ms; this one takes %.4g ms",
                            1e3 * result.certificate.seconds, 1e3 * result.seconds);
  const auto least = std::min_element(result.capacities.begin(), result.capacities.end());
  if (least != result.capacities.end() && *least < planner::kNoLimit) {
    bytes.line = std::max(0.0, *least);
    bytes.line_name = planner::bytes_text(*least) + " for tables";
  }

  // Seconds of every table on every rank.
  const planner::CostModel model(problem);
  std::map<std::string_view, const planner::Table*> tables;
  for (const planner::Table& table : problem.tables) tables[table.name] = &table;
  std::vector<std::vector<double>> seconds(result.plan.size(), std::vector<double>(world, 0));
  std::vector<double> totals(result.plan.size(), 0);
  double most = 0;
  for (std::size_t t = 0; t < result.plan.size(); ++t) {
    const planner::TablePlan& one = result.plan[t];
    const planner::Table& table = *tables.at(one.name);
    const auto load = model.load_of(table);
    for (const planner::Shard& shard : one.shards) {
      double& cell = seconds[t][static_cast<std::size_t>(shard.rank)];
      cell += model
                  .cost(table, load, one.cut, one.kernel, shard.rows, shard.columns, shard.rank,
                        shard.row)
                  .seconds.total();
      most = std::max(most, cell);
    }
    totals[t] = std::accumulate(seconds[t].begin(), seconds[t].end(), 0.0);
  }
  std::vector<std::size_t> drawn(result.plan.size());
  std::iota(drawn.begin(), drawn.end(), std::size_t{0});
  if (drawn.size() > kMostTables) {
    std::stable_sort(drawn.begin(), drawn.end(),
                     [&](std::size_t a, std::size_t b) { return totals[a] > totals[b]; });
    drawn.resize(kMostTables);
  }
  const double map_top = 2 * (kHeight + 60);
  const double height = map_top + kRow * static_cast<double>(drawn.size()) + 30;
  std::string text = text_of(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
      "font-family=\"sans-serif\" font-size=\"10\">\n",
      kLeft + kWidth + 20, height);
  text += "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  text += bars_text(times, order, 40) + bars_text(bytes, order, kHeight + 100);
  const bool is_cut = drawn.size() < result.plan.size();
  text += label(kLeft, map_top + 18, "start",
                is_cut ? text_of("the %zu longest of %zu tables on ranks, by seconds", drawn.size(),
                                 result.plan.size())
                       : "tables on ranks, by seconds");
  const double step = kWidth / static_cast<double>(world);
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    const double y = map_top + 24 + kRow * static_cast<double>(i);
    text += label(kLeft - 4, y + 9, "end", result.plan[drawn[i]].name.substr(0, 20));
    for (std::size_t k = 0; k < order.size(); ++k) {
      const double value = seconds[drawn[i]][order[k]];
      if (value > 0) {
        text += box(kLeft + step * static_cast<double>(k), y, step, kRow - 1, "#4c78a8",
                    0.15 + 0.85 * value / most);
      }
    }
  }
  return text + "</svg>\n";
}

}  // namespace tessera::cli
