#include "report/comparison.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "report/curves.h"
#include "report/html.h"
#include "report/page.h"
#include "report/page_template.h"
#include "report/run_folder.h"
#include "settings/config_file.h"

namespace tessera::workloads::report {
namespace {

using Json = nlohmann::ordered_json;
using Settings = std::vector<settings::FileSetting>;

Settings settings_of(const RunRecord& run) {
  Settings all = settings::settings_in("runs", run.name + "/" + kConfigFile, run.config);
  std::erase_if(all, [](const auto& setting) {
    return setting.key == "runs" || setting.key == "save" || setting.key == "resume";
  });
  return all;
}

std::optional<std::string> value_in(const Settings& all, const std::string& key) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const auto& setting) { return setting.key == key; });
  return found == all.end() ? std::nullopt : std::optional(found->value);
}

double middle_of(const std::vector<StepRow>& rows, double StepRow::* value) {
  std::vector<double> values;
  for (const StepRow& row : rows) values.push_back(row.*value);
  return median(std::move(values));
}

const EvalRow* best_of(const RunRecord& run) {
  for (const EvalRow& row : run.evals) {
    if (row.step == run.best_step) return &row;
  }
  return nullptr;
}

std::string in_words(const std::string& name) {
  std::string words = name;
  std::replace(words.begin(), words.end(), '_', ' ');
  return words;
}

std::string status_words(const RunRecord& run) {
  return run.has_ended ? run.status : "not finished";
}

Json json_of(const std::vector<Difference>& rows) {
  Json all = Json::array();
  for (const Difference& row : rows) {
    all.push_back(
        {row.name, row.first.empty() ? "–" : row.first, row.second.empty() ? "–" : row.second});
  }
  return all;
}

}  // namespace

std::vector<std::pair<std::string, double>> figures_of(const EvalRow& row) {
  std::vector<std::pair<std::string, double>> all;
  const auto add = [&all](const char* name, double value) {
    if (std::isfinite(value)) all.emplace_back(name, value);
  };
  add("log_loss", row.log_loss);
  add("auc", row.auc);
  add("normalised_entropy", row.normalized_entropy);
  add("calibration", row.calibration);
  all.insert(all.end(), row.others.begin(), row.others.end());
  return all;
}

std::vector<Difference> setting_differences(const RunRecord& first, const RunRecord& second) {
  const Settings one = settings_of(first);
  const Settings other = settings_of(second);
  std::vector<Difference> rows;
  for (const auto& [key, value, line] : one) {
    const std::string there = value_in(other, key).value_or("");
    if (there != value) rows.push_back({key, value, there});
  }
  for (const auto& [key, value, line] : other) {
    if (!value_in(one, key) && !value.empty()) rows.push_back({key, "", value});
  }
  return rows;
}

std::vector<Difference> figure_rows(const RunRecord& first, const RunRecord& second) {
  std::vector<Difference> rows;
  const auto add = [&](const std::string& name, const auto& text) {
    Difference row{name, text(first), text(second)};
    if (!row.first.empty() || !row.second.empty()) rows.push_back(std::move(row));
  };
  const auto finite = [](double value) { return std::isfinite(value) ? number(value) : ""; };
  add("status", status_words);
  add("ranks", [](const RunRecord& run) { return std::to_string(run.num_ranks); });
  add("steps", [](const RunRecord& run) { return std::to_string(run.total_steps); });
  add("seconds", [&](const RunRecord& run) { return finite(run.total_seconds); });
  add("last loss", [&](const RunRecord& run) {
    return run.steps.empty() ? std::string() : finite(run.steps.back().loss);
  });
  std::vector<std::string> names;
  for (const RunRecord* run : {&first, &second}) {
    for (const EvalRow& row : run->evals) {
      for (const auto& [name, value] : figures_of(row)) {
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      }
    }
  }
  const auto figure_in = [&](const EvalRow* row, const std::string& wanted) {
    if (row == nullptr) return std::string();
    for (const auto& [name, value] : figures_of(*row)) {
      if (name == wanted) return finite(value);
    }
    return std::string();
  };
  for (const std::string& name : names) {
    add("last " + in_words(name), [&](const RunRecord& run) {
      return figure_in(run.evals.empty() ? nullptr : &run.evals.back(), name);
    });
  }
  add("best at step", [](const RunRecord& run) {
    return run.best_step > 0 ? std::to_string(run.best_step) : std::string();
  });
  for (const std::string& name : names) {
    add("best " + in_words(name),
        [&](const RunRecord& run) { return figure_in(best_of(run), name); });
  }
  add(first.unit + "/s", [&](const RunRecord& run) {
    return finite(middle_of(run.steps, &StepRow::samples_per_second));
  });
  add("step, ms",
      [&](const RunRecord& run) { return finite(1e3 * middle_of(run.steps, &StepRow::seconds)); });
  add("peak memory", [](const RunRecord& run) {
    const auto most = std::max_element(run.peak_memory_bytes.begin(), run.peak_memory_bytes.end());
    return most == run.peak_memory_bytes.end() ? std::string() : bytes_text(*most);
  });
  return rows;
}

std::string make_comparison(const RunRecord& first, const RunRecord& second) {
  const Json data{{"runs", {page_data(first), page_data(second)}},
                  {"settings", json_of(setting_differences(first, second))},
                  {"figures", json_of(figure_rows(first, second))}};
  return filled_page(first.name + " and " + second.name, kCompareScript, data);
}

}  // namespace tessera::workloads::report
