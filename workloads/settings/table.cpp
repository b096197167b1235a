#include "settings/table.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <sstream>

namespace tessera::settings {
namespace {

constexpr std::size_t kWidth = 100;  // of a line of help
constexpr std::size_t kColumn = 28;  // where descriptions begin

std::string number_text(double number) {
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), number).ptr;
  return {text, end};
}

void append(std::string& list, const std::string& word, const char* between = ", ") {
  list += (list.empty() ? "" : between) + word;
}

// "a, b or c".
std::string alternatives(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + words[i];
  }
  return text;
}

std::string flag_of(const Setting& setting) {
  std::string text = setting.letter == 0 ? "" : std::string("-") + setting.letter + ", ";
  text += "--" + setting.name;
  return setting.word.empty() ? text : text + " " + setting.word;
}

std::string description_of(const Setting& setting) {
  std::string text = setting.help;
  if (!setting.choices.empty()) append(text, alternatives(setting.choices), ": ");
  if (!setting.shown_default.empty()) append(text, "(" + setting.shown_default + ")", " ");
  return text;
}

// `names`, then `text` from the column on, over as many lines as it takes.
std::string help_lines(const std::string& names, const std::string& text) {
  std::string lines = "  " + names;
  std::string line = lines + (lines.size() + 2 > kColumn ? "  " : "");
  line.resize(std::max(line.size(), kColumn), ' ');
  lines.clear();
  std::istringstream words(text);
  bool is_first = true;
  for (std::string word; words >> word; is_first = false) {
    if (!is_first && line.size() + 1 + word.size() > kWidth) {
      lines += line + "\n";
      line = std::string(kColumn, ' ') + word;
    } else {
      line += (is_first ? "" : " ") + word;
    }
  }
  return lines + line + "\n";
}

std::string shown(const std::string& key, const std::string& value) {
  return "--" + key + " " + (value.empty() ? "\"\"" : value);
}

}  // namespace

Setting& Setting::not_negative() {
  // strtod alone lets NaN pass, and CLI11's own check too.
  return check([](const std::string& text) {
    char* end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    const bool is_number = !text.empty() && *end == '\0';
    return is_number && std::isfinite(number) && number >= 0
               ? std::string()
               : "'" + text + "' is not a number from 0 on";
  });
}

std::string Setting::text() const {
  if (const auto* flag = std::get_if<bool*>(&value)) return **flag ? "true" : "false";
  if (const auto* number = std::get_if<int*>(&value)) return std::to_string(**number);
  if (const auto* number = std::get_if<std::int64_t*>(&value)) return std::to_string(**number);
  if (const auto* number = std::get_if<double*>(&value)) return number_text(**number);
  return **std::get_if<std::string*>(&value);
}

Table::Table(std::string head, std::string more) : head_(std::move(head)), more_(std::move(more)) {}

Setting& Table::append(Setting setting) {
  setting.group = group_;
  if (!setting.word.empty()) setting.shown_default = setting.text();
  return settings_.emplace_back(std::move(setting));
}

void Table::add_common(bool& print_config, bool& wants_help) {
  has_config_ = true;
  add_switch("print-config", print_config, "");
  add_switch("help", wants_help, "").short_flag('h');
}

std::string Table::help() const {
  std::string text = head_;
  std::string names;
  std::string description;
  std::string group;
  const auto flush = [&] {
    if (!names.empty()) text += help_lines(names, description);
    names.clear();
    description.clear();
  };
  for (const Setting& setting : settings_) {
    if (setting.name == "print-config" || setting.name == "help") continue;
    if (!setting.is_beside) flush();
    if (setting.group != group) text += (group = setting.group) + "\n";
    settings::append(names, flag_of(setting), " ");
    settings::append(description, description_of(setting));
  }
  flush();
  if (has_config_) {
    text +=
        help_lines("--config FILE", "read flags from a TOML file; --print-config shows the result");
  }
  return text + more_;
}

std::string Table::config() const {
  std::string text;
  for (const Setting& setting : settings_) {
    if (setting.on_resume == OnResume::kOneCall) continue;
    const std::string value = setting.text();
    // Between single quotes nothing is an escape.
    const char* quote = !std::holds_alternative<std::string*>(setting.value) ? ""
                        : value.find_first_of("\"\\") == std::string::npos   ? "\""
                                                                             : "'";
    text += setting.name + "=" + quote + value + quote + "\n";
  }
  return text;
}

Difference difference(const Table& saved, const Table& given, OnResume rule) {
  Difference all;
  for (std::size_t i = 0; i < given.settings().size(); ++i) {
    const Setting& before = saved.settings()[i];
    const Setting& now = given.settings()[i];
    if (now.on_resume != rule || before.text() == now.text()) continue;
    append(all.saved, shown(before.name, before.text()));
    append(all.given, shown(now.name, now.text()));
    append(all.changes, shown(now.name, now.text()) + " (was " +
                            (before.text().empty() ? "\"\"" : before.text()) + ")");
  }
  return all;
}

}  // namespace tessera::settings
