// settings/table.h — the settings of a verb, each written once: name, place, default, range, help,
// and what a run that goes on may do with it. No LibTorch.
//
//   settings::Table table;
//   table.group("training");
//   table.add("steps", options.steps, "N", "steps").range(0, 1000);
//   table.add("batch", options.batch, "N", "samples per step").range(1, 1 << 20).beside();
//
// Flags and configuration files (flags.h), `--help`, `--print-config` and the comparison with a run
// that is resumed come from the table; the value that a setting has when it is added is its
// default.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/core/export.h"

namespace tessera::settings {

/// What happens if a run goes on with another value.
enum class OnResume : std::uint8_t {
  kFree,
  kTold,     // allowed, and named on standard error
  kFixed,    // refused
  kOneCall,  // not a setting of a run: cannot stand in a configuration file
};

struct TESSERA_API Setting {
  std::string name;  // of the flag, without dashes, and of the key in a file
  std::variant<bool*, int*, std::int64_t*, double*, std::string*> value;
  std::string word;  // stands for a value in the help; none for a switch
  std::string help;
  std::string shown_default = {};  // in the help; the value when it was added
  std::string group = {};          // heading in the help
  std::string in_section = {};     // "section.key": its other name in a configuration file
  char letter = 0;                 // the short flag
  bool is_beside = false;          // shares the line of the setting before it in the help
  OnResume on_resume = OnResume::kFree;
  std::vector<std::string> choices = {};
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges = {};
  /// Each returns what is wrong with a text, or nothing.
  std::vector<std::function<std::string(const std::string&)>> checks = {};

  Setting& range(std::int64_t low, std::int64_t high) { return put(ranges, {low, high}); }
  /// A finite number, zero or more.
  Setting& not_negative();
  Setting& check(std::function<std::string(const std::string&)> wrong_with) {
    return put(checks, std::move(wrong_with));
  }
  Setting& one_of(std::vector<std::string> words) { return set(choices, std::move(words)); }
  Setting& shown(std::string text) { return set(shown_default, std::move(text)); }
  Setting& beside() { return set(is_beside, true); }
  /// A file may say `key` under `[section]` in place of the flag's name.
  Setting& section(const std::string& section, const std::string& key) {
    return set(in_section, section + "." + key);
  }
  Setting& short_flag(char one) { return set(letter, one); }
  Setting& told() { return set(on_resume, OnResume::kTold); }
  Setting& fixed() { return set(on_resume, OnResume::kFixed); }
  Setting& one_call() { return set(on_resume, OnResume::kOneCall); }

  /// The value as a configuration file would have it, without quotes.
  std::string text() const;

 private:
  template <class Member, class Value>
  Setting& set(Member& member, Value&& to) {
    member = std::forward<Value>(to);
    return *this;
  }
  template <class One>
  Setting& put(std::vector<One>& list, One one) {
    list.push_back(std::move(one));
    return *this;
  }
};

/// The pointers in it are the caller's, and must live while values are read.
class TESSERA_API Table {
 public:
  /// `head` begins the help: usage, examples, a few sentences; `more` ends it.
  explicit Table(std::string head = "", std::string more = "");

  /// Settings that are added from now on stand under this heading.
  void group(std::string heading) { group_ = std::move(heading); }
  template <class T>
  Setting& add(std::string name, T& value, std::string word, std::string help) {
    return append({std::move(name), &value, std::move(word), std::move(help)});
  }
  /// A switch of one call, such as --json.
  Setting& add_switch(std::string name, bool& value, std::string help) {
    return add(std::move(name), value, "", std::move(help)).one_call();
  }
  /// --config, --print-config and --help.
  void add_common(bool& print_config, bool& wants_help);

  const std::vector<Setting>& settings() const noexcept { return settings_; }
  bool has_config() const noexcept { return has_config_; }

  /// The whole text of --help.
  std::string help() const;
  /// All settings that a file may have, `key=value` line by line, as --config reads them.
  std::string config() const;

 private:
  Setting& append(Setting setting);

  std::string head_;
  std::string more_;
  std::string group_;
  std::vector<Setting> settings_;
  bool has_config_ = false;
};

/// What `given` has otherwise than `saved`, among settings with this rule: "--lr 0.1, …" of both.
struct Difference {
  std::string saved;
  std::string given;
  std::string changes;  // "--lr 0.1 (was 0.2), …"
  bool is_empty() const { return given.empty(); }
};
TESSERA_API Difference difference(const Table& saved, const Table& given, OnResume rule);

}  // namespace tessera::settings
