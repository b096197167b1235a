#include "report/chart.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "report/html.h"

namespace tessera::workloads::report {
namespace {

using Points = std::vector<std::pair<double, double>>;

constexpr double kSide = 1000;           // of the drawing, which the page stretches
constexpr std::size_t kStretches = 300;  // a thinned curve has twice as many points

struct Range {
  double low = 0;
  double high = 1;

  double share(double value) const { return (value - low) / (high - low); }
};

struct Axes {
  Range x;
  Range y;
  std::vector<double> y_ticks;
};

std::string coordinate(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", value);
  return text;
}

// As many decimals as tell one tick from the next.
std::string tick_text(double tick, double step) {
  const double unit = std::abs(tick) >= 999.5e3 ? 1e6 : std::abs(tick) >= 9995 ? 1e3 : 1;
  int digits = 0;
  for (double s = step / unit; digits < 6 && std::abs(s - std::round(s)) > 1e-6 * s; s *= 10) {
    ++digits;
  }
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f%s", digits, tick / unit,
                unit == 1e6   ? "M"
                : unit == 1e3 ? "k"
                              : "");
  return text;
}

double step_of(const std::vector<double>& ticks) {
  return ticks.size() < 2 ? 1 : ticks[1] - ticks[0];
}

std::string percent_of(double share) { return coordinate(100 * share) + "%"; }

Points thinned(const Points& points) {
  if (points.size() <= 2 * kStretches) return points;
  Points result;
  for (std::size_t i = 0; i < kStretches; ++i) {
    const auto first = points.begin() + static_cast<long>(i * points.size() / kStretches);
    const auto last = points.begin() + static_cast<long>((i + 1) * points.size() / kStretches);
    const auto [low, high] = std::minmax_element(
        first, last, [](const auto& a, const auto& b) { return a.second < b.second; });
    result.push_back(std::min(*low, *high));
    if (low != high) result.push_back(std::max(*low, *high));
  }
  return result;
}

void widen(Range& range, double value) {
  range.low = std::min(range.low, value);
  range.high = std::max(range.high, value);
}

// The middle of the values, not their extremes: the first loss of a training may be far away.
Range value_range(const Chart& chart) {
  std::vector<double> values;
  for (const Curve& curve : chart.curves) {
    for (const auto& [x, y] : curve.points) {
      if (std::isfinite(y)) values.push_back(y);
    }
  }
  std::sort(values.begin(), values.end());
  const std::size_t cut = values.size() >= 50 ? values.size() / 50 : 0;
  Range range{values[cut], values[values.size() - 1 - cut]};
  const double reach = range.high - range.low;
  // Extremes close to the rest are shown after all.
  if (values.front() > range.low - 0.5 * reach) range.low = values.front();
  if (values.back() < range.high + 0.5 * reach) range.high = values.back();
  if (chart.ceiling) widen(range, chart.ceiling->value);
  if (chart.begins_at_zero) widen(range, 0);
  if (range.low == range.high) {
    const double pad = range.low == 0 ? 1 : std::abs(range.low) * 0.1;
    range = {range.low - pad, range.high + pad};
  }
  return range;
}

Axes make_axes(const Chart& chart) {
  Axes axes;
  bool is_first = true;
  for (const Curve& curve : chart.curves) {
    for (const auto& [x, y] : curve.points) {
      if (is_first) axes.x = {x, x};
      is_first = false;
      widen(axes.x, x);
    }
  }
  if (axes.x.low == axes.x.high) axes.x = {axes.x.low - 1, axes.x.high + 1};
  axes.y = value_range(chart);
  axes.y_ticks = ticks(axes.y.low, axes.y.high, 5);
  widen(axes.y, axes.y_ticks.front());
  widen(axes.y, axes.y_ticks.back());
  return axes;
}

// "M x y L x y …" with a new M after each gap.
std::string path_of(const Points& points, const Axes& axes) {
  std::string path;
  bool is_pen_down = false;
  for (const auto& [x, y] : points) {
    if (!std::isfinite(y)) {
      is_pen_down = false;
      continue;
    }
    path += (is_pen_down ? "L" : "M") + coordinate(kSide * axes.x.share(x)) + " " +
            coordinate(kSide * (1 - axes.y.share(y)));
    is_pen_down = true;
  }
  return path;
}

// Lines of no length with round ends: dots that stay round when the drawing is stretched.
std::string dots_of(const Points& points, const Axes& axes) {
  std::string path;
  for (const auto& [x, y] : points) {
    if (!std::isfinite(y)) continue;
    path += "M" + coordinate(kSide * axes.x.share(x)) + " " +
            coordinate(kSide * (1 - axes.y.share(y))) + "h0";
  }
  return path;
}

// Points without a neighbour that a line could lead to.
Points lonely(const Points& points) {
  const auto is_there = [&](std::size_t i) {
    return i < points.size() && std::isfinite(points[i].second);
  };
  Points result;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (!is_there(i + 1) && (i == 0 || !is_there(i - 1))) result.push_back(points[i]);
  }
  return result;
}

std::string drawing(const Chart& chart, const Axes& axes) {
  std::string svg =
      R"(<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label=")" +
      escape(chart.title + " by " + chart.x_name) + "\">";
  for (const double tick : axes.y_ticks) {
    const std::string y = coordinate(kSide * (1 - axes.y.share(tick)));
    svg += "<path class=\"grid\" d=\"M0 " + y + "H1000\"/>";
  }
  if (chart.ceiling) {
    svg += "<path class=\"ceiling\" d=\"M0 " +
           coordinate(kSide * (1 - axes.y.share(chart.ceiling->value))) + "H1000\"/>";
  }
  for (const Curve& curve : chart.curves) {
    const Points points = thinned(curve.points);
    svg += "<path class=\"curve " + curve.style + "\" d=\"" + path_of(points, axes) + "\"/>";
    const std::string dots = dots_of(curve.shows_points ? points : lonely(points), axes);
    if (!dots.empty()) svg += "<path class=\"dots " + curve.style + "\" d=\"" + dots + "\"/>";
  }
  return svg + "</svg>";
}

std::string labels(const Axes& axes) {
  std::string html = "<div class=\"ys\" aria-hidden=\"true\">";
  for (const double tick : axes.y_ticks) {
    html += "<span style=\"top:" + percent_of(1 - axes.y.share(tick)) + "\">" +
            tick_text(tick == 0 ? 0 : tick, step_of(axes.y_ticks)) + "</span>";
  }
  html += "</div><div class=\"xs\" aria-hidden=\"true\">";
  const std::vector<double> x_ticks = ticks(axes.x.low, axes.x.high, 5);
  for (const double tick : x_ticks) {
    if (tick < axes.x.low || tick > axes.x.high) continue;
    html += "<span style=\"left:" + percent_of(axes.x.share(tick)) + "\">" +
            tick_text(tick, step_of(x_ticks)) + "</span>";
  }
  return html + "</div>";
}

std::string legend(const Chart& chart) {
  std::string html = "<ul class=\"legend\">";
  for (const Curve& curve : chart.curves) {
    html += "<li><i class=\"" + curve.style + "\"></i>" + escape(curve.name) + "</li>";
  }
  if (chart.ceiling) {
    html += "<li><i class=\"ceiling\"></i>" + escape(chart.ceiling->name) + "</li>";
  }
  return html + "</ul>";
}

// What the pointer reads: the curves and the corners of the drawing.
std::string hover_data(const Chart& chart, const Axes& axes) {
  nlohmann::ordered_json data;
  data["x"] = {axes.x.low, axes.x.high};
  data["y"] = {axes.y.low, axes.y.high};
  data["name"] = chart.x_name;
  data["curves"] = nlohmann::ordered_json::array();
  for (const Curve& curve : chart.curves) {
    nlohmann::ordered_json one{{"name", curve.name}, {"style", curve.style}};
    one["points"] = nlohmann::ordered_json::array();
    for (const auto& [x, y] : thinned(curve.points)) {
      if (std::isfinite(y)) one["points"].push_back({x, std::stod(number(y))});
    }
    data["curves"].push_back(std::move(one));
  }
  return "<script type=\"application/json\">" + escape_json(data.dump()) + "</script>";
}

}  // namespace

std::vector<double> ticks(double low, double high, int count) {
  const double rough = (high - low) / count;
  if (!(rough > 0) || !std::isfinite(rough)) return {low};
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= rough) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> result;
  const auto first = static_cast<long>(std::floor(low / step + 1e-9));
  const auto last = static_cast<long>(std::ceil(high / step - 1e-9));
  for (long i = first; i <= last; ++i) result.push_back(static_cast<double>(i) * step);
  return result;
}

Points smooth(const Points& points, double reach) {
  const double keep = std::exp(-1 / std::max(reach, 1e-9));
  Points result;
  double sum = 0;
  double weight = 0;
  for (const auto& [x, y] : points) {
    if (!std::isfinite(y)) continue;
    sum = keep * sum + y;
    weight = keep * weight + 1;
    result.emplace_back(x, sum / weight);
  }
  return result;
}

std::string chart_figure(const Chart& chart, const std::string& numbers) {
  const bool has_points = std::any_of(chart.curves.begin(), chart.curves.end(), [](const Curve& c) {
    return std::any_of(c.points.begin(), c.points.end(),
                       [](const auto& point) { return std::isfinite(point.second); });
  });
  if (!has_points) return "";
  const Axes axes = make_axes(chart);
  std::string html = "<figure class=\"chart\" id=\"" + escape(chart.id) + "\"><figcaption><h3>" +
                     escape(chart.title) + "</h3>" + legend(chart) + "</figcaption>";
  if (!chart.note.empty()) html += "<p class=\"note\">" + escape(chart.note) + "</p>";
  html += "<div class=\"plot\">" + labels(axes) + "<div class=\"area\">" + drawing(chart, axes) +
          "</div></div>";
  if (!numbers.empty()) {
    html +=
        "<details><summary>Numbers</summary><div class=\"scroll\">" + numbers + "</div></details>";
  }
  return html + hover_data(chart, axes) + "</figure>";
}

}  // namespace tessera::workloads::report
