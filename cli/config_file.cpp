#include "config_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kBlank = " \t\r";

std::string trimmed(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(kBlank) + 1 - begin);
}

/// Where a line is, for what is wrong with it.
struct Place {
  const std::string& verb;
  const std::string& path;
  int line;

  [[noreturn]] void refuse(const std::string& what, const std::string& why,
                           const std::string& advice) const {
    throw launch::LaunchError(launch::kExitConfiguration,
                              verb + ": " + path + ", line " + std::to_string(line) + ": " + what,
                              why, advice);
  }
};

std::string without_quotes(const std::string& text) {
  const bool is_quoted =
      text.size() >= 2 && (text[0] == '"' || text[0] == '\'') && text.back() == text[0];
  return is_quoted ? text.substr(1, text.size() - 2) : text;
}

// One number, word or quoted text, then nothing but a comment.
std::string value_of(const std::string& text, const std::string& key, const Place& place) {
  if (text.starts_with('[') || text.starts_with('{')) {
    place.refuse(key + " has a list or a table", "a value is one number, word or quoted text",
                 "several numbers go into one text, as in bottom = \"128,32\"");
  }
  const bool is_quoted = text.starts_with('"') || text.starts_with('\'');
  const std::size_t end = is_quoted ? text.find(text[0], 1) : text.find('#');
  if (is_quoted && end == std::string::npos) {
    place.refuse(key + " has a text without an end",
                 "the closing " + text.substr(0, 1) + " is missing", "close it on the same line");
  }
  const std::string value = is_quoted ? text.substr(0, end + 1) : trimmed(text.substr(0, end));
  const std::string rest = is_quoted ? trimmed(text.substr(end + 1)) : "";
  const bool is_one_word = !value.empty() && value.find_first_of(kBlank) == std::string::npos;
  if (!is_quoted && !is_one_word) {
    place.refuse(value.empty() ? key + " has no value" : key + " has several words",
                 "a value is one number, word or quoted text", "put a text into quotes");
  }
  if (!rest.empty() && !rest.starts_with('#')) {
    place.refuse(key + " has more after its value: " + rest,
                 "a value is one number, word or quoted text", "leave the rest out");
  }
  return without_quotes(value);
}

}  // namespace

std::vector<Setting> settings_in(const std::string& verb, const std::string& path,
                                 const std::string& text) {
  std::vector<Setting> settings;
  std::map<std::string, int> seen;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    const Place place{verb, path, number};
    line = trimmed(line);
    if (line.empty() || line.starts_with('#')) continue;
    if (line.starts_with('[')) {
      place.refuse("a section " + line, "keys are the names of flags and stand in no section",
                   "leave the line out");
    }
    const std::size_t equals = line.find('=');
    const std::string key = without_quotes(trimmed(line.substr(0, equals)));
    if (equals == std::string::npos || key.empty()) {
      place.refuse("'" + line + "' is not a setting", "a setting is key = value",
                   "write key = value, or begin the line with #");
    }
    const auto [first, is_new] = seen.emplace(key, number);
    if (!is_new) {
      place.refuse(key + " is set again", "it is set in line " + std::to_string(first->second),
                   "leave one of the two out");
    }
    settings.push_back({key, value_of(trimmed(line.substr(equals + 1)), key, place), number});
  }
  return settings;
}

std::vector<Setting> read_settings(const std::string& verb, const std::string& path) {
  std::ifstream file(path);
  const bool is_folder = std::filesystem::is_directory(path);
  if (!file || is_folder) {
    throw launch::LaunchError(
        launch::kExitConfiguration, verb + ": the configuration file " + path + " cannot be read",
        is_folder ? "it is a folder" : std::strerror(errno), "check the path given to --config");
  }
  return settings_in(verb, path, {std::istreambuf_iterator<char>(file), {}});
}

}  // namespace tessera::cli
