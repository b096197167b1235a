// report/chart.h — curves as figures: an SVG that stretches, with letters that do not.

#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::workloads::report {

struct Curve {
  std::string name;
  std::string style;                              // class of the page's style sheet
  std::vector<std::pair<double, double>> points;  // by x; what is not finite is a gap
  bool shows_points = false;
};

struct Ceiling {
  double value = 0;
  std::string name;
};

struct Chart {
  std::string id;  // unique in the page
  std::string title;
  std::string note;    // one sentence under the title, or nothing
  std::string x_name;  // such as "step"
  std::vector<Curve> curves;
  std::optional<Ceiling> ceiling;  // a dashed line
  bool begins_at_zero = false;     // of the y axis
};

/// A figure with title, legend, axes and curves. Curves of many points are thinned to the smallest
/// and largest of each of a few hundred stretches, so peaks stay. `numbers` is HTML that stands
/// under the picture, folded. Empty if no curve has a point.
std::string chart_figure(const Chart& chart, const std::string& numbers);

/// Round numbers that cover [low, high], about `count` of them.
std::vector<double> ticks(double low, double high, int count);

/// The mean of the points before each point, weighted towards the nearest: what to see in a noisy
/// curve. `reach` is the number of points after which a value counts a third.
std::vector<std::pair<double, double>> smooth(const std::vector<std::pair<double, double>>& points,
                                              double reach);

}  // namespace tessera::workloads::report
