// The `tessera` program: finds the verb and hands over.

#include <unistd.h>
#include <algorithm>
#include <iterator>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "settings/help_text.h"
#include "tessera/core/version.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {

std::span<const Verb* const> verbs() {
  static constexpr const Verb* kVerbs[] = {
      &kRunVerb,    &kPsVerb,     &kInspectVerb, &kTrainVerb,  &kEvalVerb,      &kPredictVerb,
      &kRunsVerb,   &kReportVerb, &kTraceVerb,   &kPlanVerb,   &kDataVerb,      &kCkptVerb,
      &kExportVerb, &kServeVerb,  &kBenchVerb,   &kDoctorVerb, &kCompletionVerb};
  return kVerbs;
}

namespace {

// Verbs that share a line of the help, so that it fits a screen.
struct VerbPair {
  std::string_view first;
  std::string_view second;
  std::string_view summary;
};
constexpr VerbPair kPairs[] = {
    {"ps", "inspect", "list this user's live jobs; show what one's ranks are doing"},
    {"eval", "predict", "measure the model of a run on a log; score the samples of one"},
    {"runs", "report", "list and compare runs; make the page of one"},
    {"trace", "bench", "merge and sum up the traces of ranks; measure beside peers"},
    {"export", "serve", "make a package of a checkpoint; answer HTTP requests with it"},
};

std::string program_help() {
  std::string text =
      "tessera: one training job over many processes\n"
      "\n"
      "  tessera run -n 4 -- ./train --epochs 3       start four ranks of a program\n"
      "  tessera train dlrm --ranks 2                 train a built-in workload\n"
      "\n"
      "verbs\n";
  const auto add = [&text](const std::string& names, std::string_view summary) {
    text += "  " + names + std::string(15 - names.size(), ' ') + std::string(summary) + "\n";
  };
  for (const Verb* verb : verbs()) {
    const auto is_of = [verb](const VerbPair& pair) {
      return pair.first == verb->name || pair.second == verb->name;
    };
    const auto pair = std::find_if(std::begin(kPairs), std::end(kPairs), is_of);
    if (pair == std::end(kPairs)) {
      add(std::string(verb->name), verb->summary);
    } else if (pair->first == verb->name) {
      add(std::string(pair->first) + ", " + std::string(pair->second), pair->summary);
    }
  }
  add("help", "show the help of a verb: tessera help run");
  return text +
         "\n"
         "flags\n"
         "  -h, --help, --version   this text, or after a verb the verb's own; the version\n"
         "exit codes: 0 good, 2 usage, 65 bad file, 69 hosts not reached, 70 internal,\n"
         "78 impossible, 128+n signal n, or a rank's own. More: docs/launch.md\n";
}

const Verb* find_verb(const std::string& name) {
  for (const Verb* verb : verbs()) {
    if (verb->name == name) return verb;
  }
  return nullptr;
}

[[noreturn]] void throw_unknown_verb(const std::string& word) {
  std::vector<std::string> known = {"help"};
  for (const Verb* verb : verbs()) known.emplace_back(verb->name);
  if (word.starts_with('-')) {
    throw UsageError("unknown flag " + word + suggestion(word, {"--help", "--version"}));
  }
  throw UsageError("unknown verb '" + word + "'" + suggestion(word, known));
}

void print(std::string_view text) { std::fputs(settings::fitted_help(text).c_str(), stdout); }

// A flag where a workload or a sub-verb is wanted is a mistyped one, unless the verb knows it.
void check_subject(const Verb& verb, const std::vector<std::string>& words) {
  if (verb.subjects.empty() || words.size() < 2 || !words[1].starts_with("--")) return;
  std::vector<std::string> known = verb.flags();
  if (std::find(known.begin(), known.end(), words[1]) != known.end()) return;
  if (words[1].find('=') != std::string::npos) return;
  throw UsageError(std::string(verb.name) + ": unknown flag " + words[1] +
                   suggestion(words[1], known));
}

int dispatch(const std::vector<std::string>& words) {
  if (words.empty() || words[0] == "--help" || words[0] == "-h") {
    print(program_help());
    return words.empty() ? launch::kExitUsage : launch::kExitOk;
  }
  if (words[0] == "--version") {
    std::printf("tessera %d.%d.%d\n", kVersionMajor, kVersionMinor, kVersionPatch);
    return launch::kExitOk;
  }
  if (words[0] == "help") {
    if (words.size() == 1) {
      print(program_help());
      return launch::kExitOk;
    }
    const Verb* verb = find_verb(words[1]);
    if (verb == nullptr) throw_unknown_verb(words[1]);
    print(verb->help);
    return launch::kExitOk;
  }
  const Verb* verb = find_verb(words[0]);
  if (verb == nullptr) throw_unknown_verb(words[0]);
  check_subject(*verb, words);
  return verb->run({words.begin() + 1, words.end()});
}

void print_error(const std::string& text) {
  const char* no_color = std::getenv("NO_COLOR");
  const bool use_color = isatty(STDERR_FILENO) == 1 && (no_color == nullptr || *no_color == '\0');
  if (use_color && text.starts_with("error:")) {
    std::fprintf(stderr, "\x1b[1;31merror:\x1b[0m%s", text.c_str() + 6);
  } else {
    std::fputs(text.c_str(), stderr);
  }
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  using namespace tessera;
  try {
    return cli::dispatch({argv + 1, argv + argc});
  } catch (const cli::UsageError& error) {
    cli::print_error(std::string("error: ") + error.what() + "\n");
    return launch::kExitUsage;
  } catch (const launch::LaunchError& error) {
    cli::print_error(error.text());
    return error.exit_code();
  } catch (const std::exception& error) {
    cli::print_error(std::string("error: internal: ") + error.what() +
                     "\n  why: this is a defect of tessera"
                     "\n  try: report it with the command line\n");
    return launch::kExitInternal;
  }
}
