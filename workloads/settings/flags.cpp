#include "settings/flags.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>
#include <type_traits>

#include "settings/config_file.h"
#include "settings/help_text.h"
#include "settings/usage.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::settings {
namespace {

// Flags of torchrun that have no meaning here; silence would be a lie.
constexpr std::string_view kTorchrunOnly[] = {"--numa-binding",
                                              "--virtual-local-rank",
                                              "--signals-to-handle",
                                              "--event-log-handler",
                                              "--logs-specs",
                                              "--local-addr",
                                              "--run-path",
                                              "--duplicate-stdout-filters",
                                              "--duplicate-stderr-filters"};

constexpr const char* kShowKeys = "the verb with --print-config shows all keys";

// Takes --config and its value out of the flags, and returns it; empty without one.
std::string take_config(std::vector<std::string>& flags) {
  std::string path;
  std::vector<std::string> others;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i] == "--config" && i + 1 < flags.size()) {
      path = flags[++i];
    } else if (flags[i].starts_with("--config=")) {
      path = flags[i].substr(9);
    } else {
      others.push_back(flags[i]);
    }
  }
  flags = std::move(others);
  return path;
}

bool is_in_section(const std::string& key) { return key.find('.') != std::string::npos; }

// The sections that a configuration file may have.
std::set<std::string> sections_of(const CLI::App& app) {
  std::set<std::string> sections;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      if (is_in_section(name)) sections.insert(name.substr(0, name.find('.')));
    }
  }
  return sections;
}

std::string place_of(const std::string& path, const FileSetting& setting) {
  return path + ", line " + std::to_string(setting.line) + ": ";
}

void check_key(const CLI::App& app, const std::string& path, const FileSetting& setting) {
  const CLI::Option* option = app.get_option_no_throw("--" + setting.key);
  const std::string what = app.get_name() + ": " + place_of(path, setting);
  if (option == nullptr) {
    const std::string near = closest("--" + setting.key, long_flags(app));
    throw launch::LaunchError(
        launch::kExitConfiguration, what + "there is no key '" + setting.key + "'",
        "no flag has this name" + (near.empty() ? "" : "; the closest is " + near.substr(2)),
        kShowKeys);
  }
  if (!option->get_configurable()) {
    throw launch::LaunchError(launch::kExitConfiguration,
                              what + "'" + setting.key + "' cannot be set in a file",
                              "--" + setting.key + " is a flag for one call, not a setting",
                              "leave it out, and give the flag");
  }
}

// Two names of one setting are the same setting twice. `lines` are those of the ones before.
void check_once(const CLI::App& app, const std::string& path, const FileSetting& setting,
                std::map<std::string, int>& lines) {
  const auto [before, is_new] = lines.emplace(setting.key, setting.line);
  if (is_new) return;
  throw launch::LaunchError(
      launch::kExitConfiguration,
      app.get_name() + ": " + place_of(path, setting) + setting.key + " is set again",
      "it is set in line " + std::to_string(before->second), "leave one of the two out");
}

// For CLI11's "--flag: word not in {one,two}": the word that was meant.
std::string nearest_value(const std::string& text) {
  const std::size_t begin = text.find(" not in {");
  const std::size_t colon = text.find(": ");
  if (begin == std::string::npos || colon == std::string::npos || !text.ends_with('}')) return "";
  std::vector<std::string> values(1);
  for (std::size_t i = begin + 9; i + 1 < text.size(); ++i) {
    if (text[i] == ',') {
      values.emplace_back();
    } else {
      values.back() += text[i];
    }
  }
  return suggestion(text.substr(colon + 2, begin - colon - 2), values);
}

// Whether the words of the call have the flag of a setting: then the file's value is not read.
bool is_given(const CLI::App& app, const std::vector<std::string>& flags, const std::string& key) {
  const CLI::Option* option = app.get_option_no_throw("--" + key);
  return std::any_of(flags.begin(), flags.end(), [&](const std::string& word) {
    if (!word.starts_with('-')) return false;
    const std::string name =
        word.starts_with("--") ? word.substr(0, word.find('=')) : word.substr(0, 2);
    return app.get_option_no_throw(name) == option;
  });
}

}  // namespace

void define(CLI::App& app, const Table& table) {
  app.set_help_flag();
  for (const Setting& setting : table.settings()) {
    const std::string letter = setting.letter == 0 ? "" : std::string("-") + setting.letter + ",";
    // The parser takes the other name as a flag too; it is offered nowhere.
    const std::string other = setting.in_section.empty() ? "" : ",--" + setting.in_section;
    const std::string names = letter + "--" + setting.name + other;
    CLI::Option* option = std::visit(
        [&](auto* value) -> CLI::Option* {
          if constexpr (std::is_same_v<decltype(value), bool*>) {
            return app.add_flag(names, *value);
          } else {
            return app.add_option(names, *value)->capture_default_str()->take_last();
          }
        },
        setting.value);
    option->configurable(setting.on_resume != OnResume::kOneCall);
    for (const auto& wrong_with : setting.checks) {
      option->check(
          CLI::Validator([wrong_with](std::string& text) { return wrong_with(text); }, ""));
    }
    for (const auto& [low, high] : setting.ranges) {
      option->check(CLI::Validator(
          [](std::string& text) {
            double number = 0;
            return CLI::detail::lexical_cast(text, number) ? "" : "'" + text + "' is not a number";
          },
          ""));
      option->check(CLI::Range(low, high));
    }
    if (!setting.choices.empty()) option->check(CLI::IsMember(setting.choices));
  }
  if (table.has_config()) app.set_config("--config")->configurable(false);
}

CLI::Validator not_negative() {
  const auto check = Setting{}.not_negative().checks[0];
  return {[check](std::string& text) { return check(text); }, "NUMBER"};
}

std::string with_dashes(const std::string& word) {
  if (!word.starts_with("--")) return word;
  std::string result = word;
  const auto end = std::find(result.begin(), result.end(), '=');
  std::replace(result.begin(), end, '_', '-');
  return result;
}

std::vector<std::string> long_flags(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // accepted, but not offered
    for (const std::string& name : option->get_lnames()) {
      if (!is_in_section(name)) names.push_back("--" + name);
    }
  }
  names.emplace_back("--help");
  return names;
}

int print_help(std::string_view help) {
  std::fputs(fitted_help(help).c_str(), stdout);
  return launch::kExitOk;
}

int print_config(const CLI::App& app) {
  std::fputs(app.config_to_str(true, false).c_str(), stdout);
  return launch::kExitOk;
}

SplitWords split_words(const CLI::App& app, const std::vector<std::string>& words) {
  const std::string& verb = app.get_name();
  SplitWords split;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--") {
      split.rest.assign(words.begin() + static_cast<std::ptrdiff_t>(i) + 1, words.end());
      return split;
    }
    if (words[i].size() < 2 || words[i][0] != '-') {
      split.rest.assign(words.begin() + static_cast<std::ptrdiff_t>(i), words.end());
      return split;
    }
    const std::string word = with_dashes(words[i]);
    const bool is_long = word.starts_with("--");
    const std::string name = is_long ? word.substr(0, word.find('=')) : word.substr(0, 2);
    const CLI::Option* option = app.get_option_no_throw(name);
    if (option == nullptr) {
      for (const std::string_view flag : kTorchrunOnly) {
        if (name == flag) {
          throw UsageError(verb + ": " + name + " is a flag of torchrun that is not offered here");
        }
      }
      throw UsageError(verb + ": unknown flag " + name + suggestion(name, long_flags(app)));
    }
    split.flags.push_back(word);
    const bool has_value = is_long ? word.find('=') != std::string::npos : word.size() > 2;
    if (option->get_items_expected_max() > 0 && !has_value) {
      if (i + 1 == words.size()) throw UsageError(verb + ": " + name + " needs a value");
      split.flags.push_back(words[++i]);
    }
  }
  return split;
}

NamesAndFlags names_and_flags(const CLI::App& app, std::vector<std::string> words) {
  NamesAndFlags sorted;
  while (!words.empty()) {
    SplitWords split = split_words(app, words);
    sorted.flags.insert(sorted.flags.end(), split.flags.begin(), split.flags.end());
    words = std::move(split.rest);
    if (words.empty()) break;
    sorted.names.push_back(words.front());
    words.erase(words.begin());
  }
  return sorted;
}

void read_flags(CLI::App& app, std::vector<std::string> flags) {
  const std::string path = app.get_config_ptr() == nullptr ? "" : take_config(flags);
  std::vector<FileSetting> file;
  if (!path.empty()) file = read_config(app.get_name(), path, sections_of(app));
  std::vector<std::string> words;
  std::map<std::string, int> lines;
  for (FileSetting& setting : file) {
    // As on the command line, where --snake_case is understood too.
    if (app.get_option_no_throw("--" + setting.key) == nullptr) {
      std::string dashed = setting.key;
      std::replace(dashed.begin(), dashed.end(), '_', '-');
      if (app.get_option_no_throw("--" + dashed) != nullptr) setting.key = dashed;
    }
    check_key(app, path, setting);
    if (is_in_section(setting.key)) {
      setting.key = app.get_option("--" + setting.key)->get_lnames().front();
    }
    check_once(app, path, setting, lines);
    if (is_given(app, flags, setting.key)) continue;
    const std::string flag = "--" + setting.key;
    if (app.get_option(flag)->get_items_expected_max() == 0) {
      words.push_back(flag + "=" + setting.value);
    } else {
      words.insert(words.end(), {flag, setting.value});
    }
  }
  words.insert(words.end(), flags.begin(), flags.end());
  std::reverse(words.begin(), words.end());  // CLI11 takes the last first
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    for (const FileSetting& setting : file) {
      const std::string begin = "--" + setting.key + ": ";
      if (!text.starts_with(begin) || is_given(app, flags, setting.key)) continue;
      throw launch::LaunchError(
          launch::kExitConfiguration,
          app.get_name() + ": " + place_of(path, setting) + setting.key + " cannot be '" +
              setting.value + "'",
          text.substr(begin.size()),
          "a value that --" + setting.key + " takes; the help of the verb names them");
    }
    throw UsageError(app.get_name() + ": " + text + nearest_value(text));
  }
}

void read(const std::string& verb, const Table& table, const std::vector<std::string>& words) {
  CLI::App app("", verb);
  define(app, table);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (!split.rest.empty()) {
    throw UsageError(verb + ": takes flags only, not '" + split.rest[0] + "'");
  }
}

}  // namespace tessera::settings
