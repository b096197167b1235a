#include "report/step_pictures.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <set>

#include "report/html.h"

namespace tessera::workloads::report {
namespace {

struct PhaseName {
  std::string_view phase;
  std::string_view title;
};

// In the order of a step.
constexpr std::array<PhaseName, 10> kPhases{{{"data", "data"},
                                             {"input_dist", "input dist"},
                                             {"lookup", "lookup"},
                                             {"output_dist", "output dist"},
                                             {"dense", "dense"},
                                             {"backward", "backward"},
                                             {"all_reduce", "all-reduce"},
                                             {"optimizer", "optimizer"},
                                             {"other", "other"},
                                             {"idle", "idle"}}};
constexpr std::size_t kMaxLanes = 32;
constexpr std::size_t kMaxSpans = 6000;

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f", 1e3 * seconds);
  return text;
}

std::vector<std::string> phases_of(const RunRecord& run) {
  std::set<std::string> seen;
  for (const Breakdown& breakdown : run.breakdowns) {
    for (const auto& [phase, time] : breakdown.phases) seen.insert(phase);
  }
  std::vector<std::string> ordered;
  for (const PhaseName& known : kPhases) {
    if (seen.erase(std::string(known.phase)) != 0) ordered.emplace_back(known.phase);
  }
  ordered.insert(ordered.end(), seen.begin(), seen.end());
  return ordered;
}

double per_step(const Breakdown& breakdown, double seconds) {
  return breakdown.steps > 0 ? seconds / static_cast<double>(breakdown.steps) : 0;
}

double waited_of(const Breakdown& breakdown) {
  double waited = 0;
  for (const auto& [phase, time] : breakdown.phases) waited += time.waited;
  return waited;
}

std::string piece(const std::string& phase, double seconds, double longest, bool is_wait) {
  if (!(seconds > 0) || !(longest > 0)) return "";
  std::string title(phase_title(phase));
  if (is_wait) title += ", waiting for communication";
  return "<span class=\"" + phase_style(phase) + (is_wait ? " waits" : "") +
         "\" style=\"width:" + percent(seconds / longest) + "\" title=\"" +
         escape(title + ": " + seconds_text(seconds) + " of a step") + "\"></span>";
}

std::string bars(const RunRecord& run, const std::vector<std::string>& phases) {
  double longest = 0;
  for (const Breakdown& b : run.breakdowns) longest = std::max(longest, per_step(b, b.seconds));
  std::string html = "<div class=\"bars\" aria-hidden=\"true\">";
  for (const Breakdown& breakdown : run.breakdowns) {
    html += "<b>rank " + std::to_string(breakdown.rank) + "</b><div class=\"bar\">";
    for (const std::string& phase : phases) {
      const auto found = breakdown.phases.find(phase);
      if (found == breakdown.phases.end()) continue;
      const double waited = std::min(found->second.waited, found->second.seconds);
      html += piece(phase, per_step(breakdown, found->second.seconds - waited), longest, false) +
              piece(phase, per_step(breakdown, waited), longest, true);
    }
    html += "</div><em>" + escape(seconds_text(per_step(breakdown, breakdown.seconds))) + "</em>";
  }
  return html + "</div>";
}

std::string legend(const std::vector<std::string>& phases) {
  std::string html = "<ul class=\"legend\">";
  for (const std::string& phase : phases) {
    html +=
        "<li><i class=\"" + phase_style(phase) + "\"></i>" + escape(phase_title(phase)) + "</li>";
  }
  return html + "<li><i class=\"waits p-other\"></i>hatched: waiting for communication</li></ul>";
}

std::string breakdown_table(const RunRecord& run, const std::vector<std::string>& phases) {
  std::string html =
      "<div class=\"scroll\"><table id=\"breakdown\"><caption>Milliseconds of a mean step</caption>"
      "<thead><tr><th scope=\"col\">rank</th>";
  for (const std::string& phase : phases) {
    html += "<th scope=\"col\">" + escape(phase_title(phase)) + "</th>";
  }
  html += "<th scope=\"col\">step</th><th scope=\"col\">exposed comm</th></tr></thead><tbody>";
  for (const Breakdown& breakdown : run.breakdowns) {
    html += "<tr><th scope=\"row\">" + std::to_string(breakdown.rank) + "</th>";
    for (const std::string& phase : phases) {
      const auto found = breakdown.phases.find(phase);
      const double seconds = found == breakdown.phases.end() ? 0 : found->second.seconds;
      html += "<td>" + milliseconds(per_step(breakdown, seconds)) + "</td>";
    }
    html += "<td>" + milliseconds(per_step(breakdown, breakdown.seconds)) + "</td><td>" +
            milliseconds(per_step(breakdown, waited_of(breakdown))) + "</td></tr>";
  }
  return html + "</tbody></table></div>";
}

using Place = std::pair<int, int>;  // rank, thread

std::map<Place, std::string> draw_lanes(const RunRecord& run, double begin, double end) {
  std::map<Place, std::string> lanes;
  std::size_t count = 0;
  for (const TraceSpan& span : run.spans) {
    if (++count > kMaxSpans) break;
    char place[160];
    std::snprintf(place, sizeof(place), "x=\"%.2f\" width=\"%.2f\" y=\"%d\" height=\"%d\"",
                  1000 * (span.begin - begin) / (end - begin),
                  std::max(0.3, 1000 * span.duration / (end - begin)), span.is_wait ? 50 : 0,
                  span.is_wait ? 50 : 100);
    lanes[{span.rank, span.thread}] +=
        "<rect class=\"" + (span.is_wait ? std::string("t-wait") : phase_style(span.phase)) +
        "\" " + place + "><title>" +
        escape(span.name + ", step " + std::to_string(span.step) + ": " +
               seconds_text(span.duration / 1e6)) +
        "</title></rect>";
  }
  return lanes;
}

// Where a step begins, on the rank that begins it last.
std::map<std::int64_t, double> step_marks(const RunRecord& run) {
  std::map<std::int64_t, std::map<int, double>> first;
  for (const TraceSpan& span : run.spans) first[span.step].try_emplace(span.rank, span.begin);
  std::map<std::int64_t, double> marks;
  for (const auto& [step, ranks] : first) {
    for (const auto& [rank, begin] : ranks) marks[step] = std::max(marks[step], begin);
  }
  return marks;
}

}  // namespace

std::string_view phase_title(std::string_view phase) {
  for (const PhaseName& known : kPhases) {
    if (known.phase == phase) return known.title;
  }
  return phase;
}

std::string phase_style(std::string_view phase) {
  for (const PhaseName& known : kPhases) {
    if (known.phase == phase) return "p-" + std::string(known.phase);
  }
  return "p-other";
}

std::string breakdown_section(const RunRecord& run) {
  if (run.breakdowns.empty()) return "";
  const std::vector<std::string> phases = phases_of(run);
  return "<section><h2>Where a step goes</h2><p class=\"note\">Mean over " +
         count_text(run.breakdowns.front().steps) +
         " steps. Each part is without those inside it; idle is what no part covers.</p>" +
         legend(phases) + bars(run, phases) + breakdown_table(run, phases) + "</section>";
}

std::string timeline_section(const RunRecord& run) {
  if (run.spans.empty()) return "";
  const double begin = run.spans.front().begin;
  double end = begin;
  for (const TraceSpan& span : run.spans) end = std::max(end, span.begin + span.duration);
  if (!(end > begin)) return "";
  const auto lanes = draw_lanes(run, begin, end);
  std::string html =
      "<section><h2>Timeline</h2><p class=\"note\">" +
      count_text(static_cast<long long>(step_marks(run).size())) + " steps, " +
      escape(seconds_text((end - begin) / 1e6)) +
      ". Colours as above; the lower half marks waiting for communication. trace.json opens in "
      "Perfetto and in chrome://tracing.</p><div class=\"lanes\" aria-hidden=\"true\">";
  std::size_t count = 0;
  for (const auto& [lane, rects] : lanes) {
    if (++count > kMaxLanes) break;
    html += "<b>rank " + std::to_string(lane.first) +
            (lane.second == 0 ? "" : " · thread " + std::to_string(lane.second)) +
            "</b><svg viewBox=\"0 0 1000 100\" preserveAspectRatio=\"none\">" + rects + "</svg>";
  }
  html += "<b></b><div class=\"xs\">";
  for (const auto& [step, at] : step_marks(run)) {
    html += "<span style=\"left:" + percent((at - begin) / (end - begin)) + "\">step " +
            std::to_string(step) + "</span>";
  }
  html += "</div></div>";
  if (lanes.size() > kMaxLanes) {
    html += "<p class=\"note\">" + std::to_string(lanes.size() - kMaxLanes) +
            " more lanes are in trace.json.</p>";
  }
  return html + "</section>";
}

}  // namespace tessera::workloads::report
