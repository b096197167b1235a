// cli/verb.h — what a verb of the `tessera` program is.
//
// To add one: write cli/<verb>.cpp with a `const Verb`, declare it here, add it to the table in
// main.cpp and to CMakeLists.txt. Help, typos, completion and `tessera help <verb>` follow.

#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

struct Verb {
  std::string_view name;
  std::string_view summary;  // one line of `tessera --help`
  std::string_view help;     // the whole text of `tessera <verb> --help`
  /// Runs the verb with the words after its name; returns the exit code.
  int (*run)(const std::vector<std::string>& words);
  /// Returns the long flags with their dashes, for completion and suggestions.
  std::vector<std::string> (*flags)();
  /// What may stand after the verb, for completion: workloads, sub-verbs.
  std::string_view subjects = "";
  /// Returns flags with the words that they take, for completion; null if there are none.
  std::map<std::string, std::string> (*values)() = nullptr;
};

extern const Verb kBenchVerb;
extern const Verb kEvalVerb;
extern const Verb kInspectVerb;
extern const Verb kPlanVerb;
extern const Verb kPredictVerb;
extern const Verb kPsVerb;
extern const Verb kReportVerb;
extern const Verb kRunVerb;
extern const Verb kRunsVerb;
extern const Verb kTraceVerb;
extern const Verb kTrainVerb;
extern const Verb kCkptVerb;
extern const Verb kExportVerb;
extern const Verb kServeVerb;
extern const Verb kDataVerb;
extern const Verb kDoctorVerb;
extern const Verb kCompletionVerb;

/// Returns all verbs, in the order of the help text.
std::span<const Verb* const> verbs();

}  // namespace tessera::cli
