#include "report/page.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "report/chart.h"
#include "report/html.h"
#include "report/placement_picture.h"
#include "report/run_folder.h"
#include "report/step_pictures.h"
#include "report/style.h"

namespace tessera::workloads::report {
namespace {

using Points = std::vector<std::pair<double, double>>;

constexpr std::size_t kMaxRows = 400;  // of a table of steps; metrics.jsonl has all

template <class Row>
Points points_of(const std::vector<Row>& rows, double Row::* value) {
  Points points;
  for (const Row& row : rows) points.emplace_back(static_cast<double>(row.step), row.*value);
  return points;
}

// The rows that a table shows: all, or evenly spread ones, the first and the last among them.
std::vector<std::size_t> shown_rows(std::size_t count) {
  std::vector<std::size_t> shown;
  if (count <= kMaxRows) {
    for (std::size_t i = 0; i < count; ++i) shown.push_back(i);
    return shown;
  }
  for (std::size_t i = 0; i < kMaxRows; ++i) shown.push_back(i * (count - 1) / (kMaxRows - 1));
  return shown;
}

std::string head_cell(const char* text) {
  return std::string("<th scope=\"col\">") + text + "</th>";
}
std::string cell(const std::string& text) { return "<td>" + escape(text) + "</td>"; }

std::string step_table(const RunRecord& run, const char* id, double StepRow::* value,
                       const char* title, double factor = 1) {
  const auto shown = shown_rows(run.steps.size());
  std::string html = std::string("<table id=\"") + id + "\">";
  if (shown.size() < run.steps.size()) {
    html += "<caption>" + std::to_string(shown.size()) + " of " + std::to_string(run.steps.size()) +
            " steps; metrics.jsonl has all</caption>";
  }
  html += "<thead><tr>" + head_cell("step") + head_cell(title) + "</tr></thead><tbody>";
  for (const std::size_t i : shown) {
    html += "<tr><th scope=\"row\">" + std::to_string(run.steps[i].step) + "</th>" +
            cell(number(run.steps[i].*value * factor)) + "</tr>";
  }
  return html + "</tbody></table>";
}

// A name of metrics.jsonl as a heading: "energy_error" is "Energy error".
std::string heading(std::string name) {
  std::replace(name.begin(), name.end(), '_', ' ');
  if (!name.empty() && name[0] >= 'a' && name[0] <= 'z') name[0] = static_cast<char>(name[0] - 32);
  return name;
}

// Figures that only the workload knows, each of which has a chart of its own.
std::size_t num_others(const RunRecord& run) {
  return run.evals.empty() ? 0 : run.evals.back().others.size();
}

std::string other_charts(const RunRecord& run) {
  std::string html;
  for (std::size_t i = 0; i < num_others(run); ++i) {
    const std::string name = run.evals.back().others[i].first;
    Chart chart{.id = "other" + std::to_string(i),
                .title = heading(name),
                .note = {},
                .x_name = "step",
                .curves = {},
                .ceiling = {}};
    Points points;
    std::string rows;
    for (const EvalRow& row : run.evals) {
      if (i >= row.others.size()) continue;
      points.emplace_back(static_cast<double>(row.step), row.others[i].second);
      rows += "<tr><th scope=\"row\">" + std::to_string(row.step) + "</th>" +
              cell(number(row.others[i].second)) + "</tr>";
    }
    chart.curves = {{"evaluation", "c-eval", std::move(points), true}};
    html += chart_figure(chart, "<table id=\"" + chart.id + "s\"><thead><tr>" + head_cell("step") +
                                    head_cell(escape(name).c_str()) + "</tr></thead><tbody>" +
                                    rows + "</tbody></table>");
  }
  return html;
}

std::string eval_table(const RunRecord& run) {
  std::string html = "<table id=\"evals\"><thead><tr>" + head_cell("step") + head_cell("log loss") +
                     head_cell("AUC") + head_cell("normalised entropy") + head_cell("calibration") +
                     head_cell("samples") + "</tr></thead><tbody>";
  for (const EvalRow& row : run.evals) {
    html += "<tr><th scope=\"row\">" + std::to_string(row.step) + "</th>" +
            cell(number(row.log_loss)) + cell(number(row.auc)) +
            cell(number(row.normalized_entropy)) + cell(number(row.calibration)) +
            cell(std::to_string(row.samples)) + "</tr>";
  }
  return html + "</tbody></table>";
}

double median(std::vector<double> values) {
  values.erase(std::remove_if(values.begin(), values.end(),
                              [](double value) { return !std::isfinite(value); }),
               values.end());
  if (values.empty()) return kMissing;
  const auto middle = values.begin() + static_cast<long>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double median_of(const std::vector<StepRow>& rows, double StepRow::* value) {
  std::vector<double> values;
  for (const StepRow& row : rows) values.push_back(row.*value);
  return median(std::move(values));
}

std::string figure(const std::string& title, const std::string& value, const std::string& small) {
  return "<div><dt>" + escape(title) + "</dt><dd>" + escape(value) +
         (small.empty() ? "" : "<small>" + escape(small) + "</small>") + "</dd></div>";
}

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return std::isfinite(value) ? text : "–";
}

std::string auc_figure(const RunRecord& run) {
  if (run.evals.empty() || !std::isfinite(run.evals.back().auc)) return "";
  std::string small = "evaluation at step " + count_text(run.evals.back().step);
  if (run.auc_ceiling) small += ", ceiling " + fixed(*run.auc_ceiling, 4);
  return figure("AUC", fixed(run.evals.back().auc, 4), small);
}

std::string exposed_figure(const RunRecord& run) {
  double waited = 0;
  double seconds = 0;
  for (const Breakdown& breakdown : run.breakdowns) {
    for (const auto& [phase, time] : breakdown.phases) waited += time.waited;
    seconds += breakdown.seconds;
  }
  if (!(seconds > 0)) return "";
  return figure("Exposed comm", fixed(100 * waited / seconds, 1) + " %",
                "of a step, mean of ranks");
}

std::string figures(const RunRecord& run) {
  std::string html = "<dl class=\"figures\">";
  if (num_others(run) > 0) {
    for (const auto& [name, value] : run.evals.back().others) {
      html += figure(heading(name), number(value), "evaluation");
    }
  } else if (!run.evals.empty()) {
    html += figure("Log loss", fixed(run.evals.back().log_loss, 4), "evaluation");
  } else if (!run.steps.empty()) {
    html += figure("Loss", fixed(run.steps.back().loss, 4), "last step");
  }
  html += auc_figure(run);
  if (!run.steps.empty()) {
    html += figure(heading(run.unit) + " per second",
                   short_number(median_of(run.steps, &StepRow::samples_per_second)), "median");
    html += figure("Step", seconds_text(median_of(run.steps, &StepRow::seconds)), "median");
  }
  html += exposed_figure(run);
  if (!run.peak_memory_bytes.empty()) {
    const double most =
        *std::max_element(run.peak_memory_bytes.begin(), run.peak_memory_bytes.end());
    html += figure("Peak memory", bytes_text(most), "largest rank");
  }
  return html + "</dl>";
}

// How far a smooth curve looks back: a fiftieth of the run, but not less than a few steps.
double reach(const RunRecord& run) {
  return std::max(4.0, static_cast<double>(run.steps.size()) / 50);
}

std::string loss_chart(const RunRecord& run) {
  const Points loss = points_of(run.steps, &StepRow::loss);
  Chart chart{
      .id = "loss", .title = "Loss", .note = {}, .x_name = "step", .curves = {}, .ceiling = {}};
  chart.curves = {{"each step", "c-train", loss, false},
                  {"training, smooth", "c-mean", smooth(loss, reach(run)), false}};
  if (!run.evals.empty()) {
    chart.curves.push_back(
        {"evaluation", "c-eval", points_of(run.evals, &EvalRow::log_loss), true});
  }
  return chart_figure(chart, step_table(run, "steps", &StepRow::loss, "loss"));
}

std::string auc_chart(const RunRecord& run) {
  Chart chart{
      .id = "auc", .title = "AUC", .note = {}, .x_name = "step", .curves = {}, .ceiling = {}};
  chart.curves = {{"evaluation", "c-eval", points_of(run.evals, &EvalRow::auc), true}};
  if (run.auc_ceiling) chart.ceiling = Ceiling{*run.auc_ceiling, "best possible"};
  return chart_figure(chart, eval_table(run));
}

std::string speed_chart(const RunRecord& run) {
  const Points speed = points_of(run.steps, &StepRow::samples_per_second);
  Chart chart{.id = "speed",
              .title = heading(run.unit) + " per second",
              .note = {},
              .x_name = "step",
              .curves = {},
              .ceiling = {},
              .begins_at_zero = true};
  chart.curves = {{"each step", "c-train", speed, false},
                  {"smooth", "c-mean", smooth(speed, reach(run)), false}};
  return chart_figure(chart, step_table(run, "speeds", &StepRow::samples_per_second,
                                        (escape(run.unit) + "/s").c_str()));
}

std::string time_chart(const RunRecord& run) {
  Points times = points_of(run.steps, &StepRow::seconds);
  Points waits = points_of(run.steps, &StepRow::exposed_comm_seconds);
  for (auto& [x, y] : times) y *= 1e3;
  for (auto& [x, y] : waits) y *= 1e3;
  Chart chart{.id = "times",
              .title = "Milliseconds per step",
              .note = {},
              .x_name = "step",
              .curves = {},
              .ceiling = {},
              .begins_at_zero = true};
  chart.curves = {{"step", "c-mean", smooth(times, reach(run) / 4), false},
                  {"exposed communication", "c-eval", smooth(waits, reach(run) / 4), false}};
  return chart_figure(chart, step_table(run, "seconds", &StepRow::seconds, "ms", 1e3));
}

std::string facts(const RunRecord& run) {
  if (run.facts.empty()) return "";
  std::string html =
      "<div><h2>Versions and machine</h2><div class=\"scroll\"><table class=\"facts\"><tbody>";
  for (const auto& [name, value] : run.facts) {
    html += "<tr><th scope=\"row\">" + escape(name) + "</th>" + cell(value) + "</tr>";
  }
  return html + "</tbody></table></div></div>";
}

std::string config(const RunRecord& run) {
  if (run.config.empty()) return "";
  return "<div><h2>Configuration</h2><pre tabindex=\"0\">" + escape(run.config) + "</pre></div>";
}

// Ranks beside the bound, and a prediction beside what was measured.
std::string plan_section(const RunRecord& run) {
  if (!run.plan) return "";
  const PlanRow& plan = *run.plan;
  const auto milliseconds = [](double seconds) { return number(seconds * 1e3); };
  const double gap = plan.bound > 0 ? 100 * (plan.seconds / plan.bound - 1) : 0;
  std::string html =
      "<section><h2>Plan</h2><p class=\"note\">" +
      escape("Sharding " + plan.sharding + ", speeds " + plan.speeds + ". Tables need " +
             milliseconds(plan.seconds) + " ms a step on the slowest rank; no plan can be under " +
             milliseconds(plan.bound) + " ms (" + fixed(gap, 2) + " %).") +
      "</p><div class=\"two\"><div class=\"scroll\"><table id=\"plan\"><thead><tr>" +
      head_cell("rank") + head_cell("ms") + head_cell("of the bound") + head_cell("memory") +
      "</tr></thead><tbody>";
  for (std::size_t r = 0; r < std::min(kMaxRows, plan.ranks.size()); ++r) {
    double seconds = 0;
    double bytes = 0;
    for (const auto& [part, value] : plan.ranks[r]) (part == "bytes" ? bytes : seconds) += value;
    html += "<tr><th scope=\"row\">" + std::to_string(r) + "</th>" + cell(milliseconds(seconds)) +
            cell(plan.bound > 0 ? fixed(100 * seconds / plan.bound, 1) + " %" : "") +
            cell(bytes_text(bytes)) + "</tr>";
  }
  html += "</tbody></table></div>";
  const auto measured = measured_parts(run);
  if (!plan.predicted.empty() && !measured.empty()) {
    html += "<div class=\"scroll\"><table id=\"prediction\"><thead><tr>" +
            head_cell("ms of a step") + head_cell("predicted") + head_cell("measured") +
            "</tr></thead><tbody>";
    double predicted_sum = 0;
    double measured_sum = 0;
    const auto row = [&](const std::string& name, double predicted, double found) {
      html += "<tr><th scope=\"row\">" + escape(name) + "</th>" + cell(milliseconds(predicted)) +
              cell(milliseconds(found)) + "</tr>";
    };
    for (const auto& [part, found] : measured) {
      const auto predicted = plan.predicted.find(part);
      if (predicted == plan.predicted.end()) continue;
      row(part, predicted->second, found);
      predicted_sum += predicted->second;
      measured_sum += found;
    }
    row("together", predicted_sum, measured_sum);
    html += "</tbody></table></div>";
  }
  return html + "</div></section>";
}

// How the run ended, its best evaluation beside its last, and how to go on.
std::string banner(const RunRecord& run) {
  if (!run.has_ended) return "";
  std::string text = run.status + " at step " + count_text(run.total_steps);
  if (run.best_step > 0 && !run.evals.empty()) {
    text += ", best evaluation at step " + count_text(run.best_step);
    for (const EvalRow& row : run.evals) {
      if (row.step != run.best_step) continue;
      const bool is_other = !row.others.empty();
      text += " (" + (is_other ? heading(row.others[0].first) : std::string("log loss")) + " " +
              number(is_other ? row.others[0].second : row.log_loss) + ")";
      break;
    }
    text += ", last at step " + count_text(run.evals.back().step);
  }
  std::string html = "<p id=\"status\"><strong>" + escape(text) + "</strong>";
  if (!run.resume.empty()) html += "; <code>" + escape(run.resume) + "</code> goes on";
  return html + "</p>";
}

std::string head(const RunRecord& run) {
  std::string line = run.workload.empty() ? "" : run.workload + " · ";
  line += std::to_string(run.num_ranks) + (run.num_ranks == 1 ? " rank" : " ranks");
  line += " · " + count_text(run.total_steps) + " steps";
  if (run.total_samples > 0) line += " · " + short_number(run.total_samples) + " " + run.unit;
  if (run.total_seconds > 0) line += " · " + seconds_text(run.total_seconds);
  if (!run.started.empty()) line += " · started " + run.started;
  if (!run.has_ended) line += " · not finished";
  return "<header><h1>" + escape(run.name) + "</h1><p>" + escape(line) + "</p>" + banner(run) +
         figures(run) + "</header>";
}

}  // namespace

std::string make_page(const RunRecord& run) {
  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'unsafe-inline'; img-src data:\">"
      "<link rel=\"icon\" href=\"data:,\"><title>" +
      escape(run.name + " · tessera") + "</title><style>" + kStyle + "</style></head><body>" +
      head(run) + "<main>";
  const std::string charts =
      loss_chart(run) + auc_chart(run) + other_charts(run) + speed_chart(run) + time_chart(run);
  html +=
      charts.empty() ? "<p>No step was logged.</p>" : "<div class=\"charts\">" + charts + "</div>";
  html +=
      breakdown_section(run) + timeline_section(run) + plan_section(run) + placement_section(run);
  html += "<div class=\"two\">" + config(run) + facts(run) + "</div></main>";
  html +=
      "<footer>Made by tessera report from metrics.jsonl and trace.json of this folder.</footer>";
  return html + "<script>" + kScript + "</script></body></html>\n";
}

std::string write_report(const std::string& folder) {
  std::string path = folder;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  path += std::string("/") + kReportFile;
  write_text(path, make_page(read_run(folder)));
  return path;
}

}  // namespace tessera::workloads::report
