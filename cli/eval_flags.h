// cli/eval_flags.h — what `tessera eval` and `tessera predict` can be told, for the verb and for
// the program that does it.

#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "flags.h"
#include "usage.h"

namespace tessera::cli {

struct EvalWords {
  std::string run;
  std::string data;
  std::string out;  // predict
  std::int64_t step = -1;
  bool takes_best = false;
  int ranks = 1;
  std::int64_t batch = 0;  // 0: the run's
  bool wants_json = false;
  bool wants_help = false;
};

inline void define_flags(CLI::App& app, EvalWords& words, bool predicts) {
  app.set_help_flag();
  app.add_option("--data", words.data)->take_last();
  if (predicts) app.add_option("--out", words.out);
  app.add_option("--step", words.step)->check(CLI::NonNegativeNumber);
  app.add_flag("--best", words.takes_best);
  app.add_option("--ranks,-n", words.ranks)->check(CLI::Range(1, 4096));
  app.add_option("--batch", words.batch)->check(CLI::Range(1, 1 << 24));
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

/// What was trained in the folder of a run: "dlrm", "lm", "gnn"; empty if that is no run.
inline std::string workload_of(const std::string& run) {
  std::ifstream metrics(run + "/metrics.jsonl");
  std::string line;
  std::getline(metrics, line);
  const std::string begin = R"("workload":")";
  const std::size_t place = line.find(begin);
  if (place == std::string::npos) return "";
  const std::size_t name = place + begin.size();
  return line.substr(name, line.find('"', name) - name);
}

/// Throws UsageError.
inline EvalWords read_eval_words(const std::string& verb, const std::vector<std::string>& words) {
  EvalWords given;
  CLI::App app("", verb);
  define_flags(app, given, verb == "predict");
  const NamesAndFlags split = names_and_flags(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return given;
  if (split.names.size() != 1) {
    throw UsageError(verb + ": name one run folder, as in tessera " + verb + " runs/2026-11-15-1");
  }
  if (given.takes_best && given.step >= 0) {
    throw UsageError(verb + ": --best and --step name two checkpoints");
  }
  given.run = split.names[0];
  return given;
}

}  // namespace tessera::cli
