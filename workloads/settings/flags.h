// settings/flags.h — what all verbs share in reading their flags.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "settings/table.h"

namespace tessera::settings {

/// Lets `app` read the settings of `table`, and --config if it has one.
void define(CLI::App& app, const Table& table);

/// A finite number, zero or more. CLI11's own check lets NaN pass.
CLI::Validator not_negative();

/// Turns `--snake_case=x` into `--snake-case=x`; other words stay as they are.
std::string with_dashes(const std::string& word);

/// Splits the words at the first one that is neither a flag nor a flag's value (or at `--`): flags
/// of the verb, and the words of the program it runs. Throws UsageError for an unknown flag.
struct SplitWords {
  std::vector<std::string> flags;
  std::vector<std::string> rest;
};
SplitWords split_words(const CLI::App& app, const std::vector<std::string>& words);

/// Sorts words that may come in any order into flags (with their values) and names. Throws
/// UsageError for an unknown flag.
struct NamesAndFlags {
  std::vector<std::string> names;
  std::vector<std::string> flags;
};
NamesAndFlags names_and_flags(const CLI::App& app, std::vector<std::string> words);

/// Lets `app` read the flags, and before them the settings of the file that --config names. Throws
/// UsageError with one line, or launch::LaunchError for a configuration file that cannot be used.
void read_flags(CLI::App& app, std::vector<std::string> flags);

/// Reads flags, and nothing else, into what `table` points to. `verb` is named in what is thrown.
void read(const std::string& verb, const Table& table, const std::vector<std::string>& words);

/// Print what the user asked for; return the exit code of a verb that has done its work.
int print_help(std::string_view help);
int print_config(const CLI::App& app);

/// Returns the long names of all flags of `app` that are in a group, with their dashes.
std::vector<std::string> long_flags(const CLI::App& app);

}  // namespace tessera::settings
