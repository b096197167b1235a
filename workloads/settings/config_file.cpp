#include "settings/config_file.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>

#define TOML_HEADER_ONLY 1
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::settings {
namespace {

// Key, and what follows the sign.
const char* const kSetting = R"(^\s*([\w.-]+|"[^"]*"|'[^']*')\s*=\s*(.*?)\s*$)";

struct Reader {
  const std::string& verb;
  const std::string& path;
  const std::set<std::string>* sections;  // null: any
  std::vector<std::string> lines;

  std::string line(std::size_t number) const {
    const std::string& text = lines.at(number - 1);
    const std::size_t begin = text.find_first_not_of(" \t\r");
    if (begin == std::string::npos) return "";
    return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
  }

  [[noreturn]] void refuse(std::size_t number, const std::string& what, const std::string& why,
                           const std::string& advice) const {
    throw launch::LaunchError(launch::kExitConfiguration,
                              verb + ": " + path + ", line " + std::to_string(number) + ": " + what,
                              why, advice);
  }

  [[noreturn]] void refuse_value(std::size_t number, const std::string& what,
                                 const std::string& advice) const {
    refuse(number, what, "a value is one number, word or quoted text", advice);
  }

  std::string text() const {
    std::string all;
    for (const std::string& one : lines) all += one + "\n";
    return all;
  }

  // The parser stopped at this line: puts quotes around a bare word, or says what is wrong.
  void mend(std::size_t number, std::string_view reason) {
    std::smatch parts;
    const std::string text = line(number);
    if (!std::regex_match(text, parts, std::regex(kSetting))) {
      refuse(number, "'" + text + "' is not a setting", "a setting is key = value",
             "write key = value, or begin the line with #");
    }
    const std::string key = parts[1];
    const std::string rest = parts[2];
    for (std::size_t before = 1; before < number; ++before) {
      std::smatch earlier;
      const std::string other = line(before);
      if (std::regex_match(other, earlier, std::regex(kSetting)) && earlier[1] == key) {
        refuse(number, key + " is set again", "it is set in line " + std::to_string(before),
               "leave one of the two out");
      }
    }
    if (rest.starts_with('"') || rest.starts_with('\'')) {
      const std::size_t end = rest.find(rest[0], 1);
      if (end == std::string::npos) {
        refuse(number, key + " has a text without an end",
               "the closing " + rest.substr(0, 1) + " is missing", "close it on the same line");
      }
      const std::size_t more = rest.find_first_not_of(" \t", end + 1);
      if (more == std::string::npos) refuse_value(number, key + ": " + std::string(reason), "");
      refuse_value(number, key + " has more after its value: " + rest.substr(more),
                   "leave the rest out");
    }
    std::smatch word;
    if (rest.starts_with('[') || rest.starts_with('{')) refuse_list(number, key);
    if (!std::regex_match(rest, word, std::regex(R"(([^\s#"]*)\s*(#.*)?)"))) {
      refuse_value(number, key + " has several words", "put a text into quotes");
    }
    if (word[1].length() == 0) {
      refuse_value(number, key + " has no value", "put a text into quotes");
    }
    lines[number - 1] = key + " = \"" + word.str(1) + "\"";
  }

  [[noreturn]] void refuse_list(std::size_t number, const std::string& key) const {
    refuse_value(number, key + " has a list or a table",
                 "several numbers go into one text, as in bottom = \"128,32\"");
  }

  std::string value_of(const std::string& key, const toml::node& node, std::size_t number) const {
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
    if (const auto* whole = node.as_integer()) return std::to_string(whole->get());
    if (const auto* real = node.as_floating_point()) {
      char text[32];
      return {text, std::to_chars(text, text + sizeof(text), real->get()).ptr};
    }
    if (is_section(node)) refuse_section(number);
    refuse_list(number, key);
  }

  static bool is_section(const toml::node& node) {
    const auto* table = node.as_table();
    return table != nullptr && !table->is_inline();
  }

  [[noreturn]] void refuse_section(std::size_t number) const {
    std::string known;
    for (const std::string& section : *sections) known += " [" + section + "]";
    refuse(number, "a section " + line(number),
           known.empty() ? "keys are the names of flags and stand in no section"
                         : "keys are the names of flags and stand in no section but" + known,
           "leave the line out");
  }

  /// Adds the settings of a table: those of a section with its name before theirs.
  void add(const toml::table& table, const std::string& section,
           std::vector<FileSetting>& settings) const {
    for (const auto& [key, node] : table) {
      const auto number = static_cast<std::size_t>(node.source().begin.line);
      const std::string name = section + std::string(key.str());
      const bool is_known = sections == nullptr || (section.empty() && sections->contains(name));
      if (is_known && is_section(node)) {
        add(*node.as_table(), name + ".", settings);
      } else {
        settings.push_back({name, value_of(name, node, number), static_cast<int>(number)});
      }
    }
  }

  std::vector<FileSetting> read() {
    for (;;) {
      try {
        std::vector<FileSetting> settings;
        const toml::table all = toml::parse(text());
        add(all, "", settings);
        std::sort(settings.begin(), settings.end(),
                  [](const auto& a, const auto& b) { return a.line < b.line; });
        return settings;
      } catch (const toml::parse_error& error) {
        // At the end of the text the parser names the line after it.
        const std::size_t last = std::max<std::size_t>(1, lines.size());
        mend(std::clamp<std::size_t>(error.source().begin.line, 1, last), error.description());
      }
    }
  }
};

std::vector<FileSetting> settings_of(const std::string& verb, const std::string& path,
                                     const std::set<std::string>* sections, std::istream& text) {
  Reader reader{verb, path, sections, {}};
  for (std::string line; std::getline(text, line);) reader.lines.push_back(line);
  return reader.read();
}

}  // namespace

std::vector<FileSetting> read_config(const std::string& verb, const std::string& path,
                                     const std::set<std::string>& sections) {
  std::ifstream file(path);
  const bool is_folder = std::filesystem::is_directory(path);
  if (!file || is_folder) {
    throw launch::LaunchError(
        launch::kExitConfiguration, verb + ": the configuration file " + path + " cannot be read",
        is_folder ? "it is a folder" : std::strerror(errno), "check the path given to --config");
  }
  return settings_of(verb, path, &sections, file);
}

std::vector<FileSetting> settings_in(const std::string& verb, const std::string& path,
                                     const std::string& text) {
  std::istringstream lines(text);
  return settings_of(verb, path, nullptr, lines);
}

}  // namespace tessera::settings
