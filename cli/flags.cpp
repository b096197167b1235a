#include "flags.h"

#include <algorithm>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"

namespace tessera::cli {
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

// What CLI11 says of a key of a configuration file, in our words.
launch::LaunchError unusable_key(const CLI::App& app, const std::string& text) {
  const std::string what = app.get_name() + ": the configuration file has ";
  const std::string advice = "the verb with --print-config shows all keys";
  if (text.find("not allowed in a configuration file") != std::string::npos) {
    const std::string key = text.substr(0, text.find(':'));
    return {launch::kExitConfiguration, what + "the key '" + key + "'",
            "--" + key + " is a flag for one call, not a setting",
            "leave it out, and give the flag"};
  }
  std::string key = text.substr(text.rfind(' ') + 1);  // its sentence ends with the key
  if (const auto dot = key.find('.'); dot != std::string::npos) {
    return {launch::kExitConfiguration, what + "a section [" + key.substr(0, dot) + "]",
            "keys are the names of flags and stand in no section", advice};
  }
  const std::string near = closest("--" + key, long_flags(app));
  return {launch::kExitConfiguration, what + "an unknown key '" + key + "'",
          "no flag has this name" + (near.empty() ? "" : "; the closest is " + near.substr(2)),
          advice};
}

}  // namespace

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
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  names.emplace_back("--help");
  return names;
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
  std::reverse(flags.begin(), flags.end());  // CLI11 takes them from the back
  try {
    app.parse(flags);
  } catch (const CLI::ConfigError& error) {
    throw unusable_key(app, error.what());
  } catch (const CLI::FileError& error) {
    throw launch::LaunchError(launch::kExitConfiguration,
                              app.get_name() + ": the configuration file cannot be read",
                              error.what(), "check the path given to --config");
  } catch (const CLI::ParseError& error) {
    throw UsageError(app.get_name() + ": " + error.what());
  }
}

}  // namespace tessera::cli
