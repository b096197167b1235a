// tessera eval, tessera predict — use the model of a run: measure it, and score a log with it.

#include <filesystem>
#include <fstream>

#include "converted_data.h"
#include "data/converted.h"
#include "data/input.h"
#include "doctor/machine.h"
#include "eval_flags.h"
#include "report/run_folder.h"
#include "settings/config_file.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/job.h"
#include "tessera/launch/launch_error.h"
#include "verb.h"
#include "worker_program.h"

namespace tessera::cli {
namespace {

using launch::LaunchError;

constexpr std::string_view kEvalHelp =
    R"(tessera eval RUN [flags]

  tessera eval runs/2026-11-15-1 --data day_2.click    the final model on another log
  tessera eval runs/2026-11-15-1                       on the samples it was judged on
  tessera eval runs/2026-11-15-1 --best --json         the best by evaluation

Measures the model of a finished tessera train: log loss, AUC, normalised
entropy and calibration of dlrm, validation loss and perplexity of lm, errors of
energies, forces and stress of gnn.

  --data FILE     a log, or a table that the run's schema describes (CSV, Parquet,
                  ...); for lm a text, for gnn extended XYZ
                  (what the run was judged on)
  --best          the best checkpoint by evaluation, not the final one
  --step N        this checkpoint
  -n, --ranks N   processes, which hold the tables together (1)
  --batch N       samples per rank at a time (the run's)
  --json          one JSON object

Exit codes: 0 good, 2 wrong usage, 65 no such run, log or checkpoint, or one that does not fit.
More: docs/your_data.md
)";

constexpr std::string_view kPredictHelp =
    R"(tessera predict RUN --data LOG --out scores.csv [flags]

  tessera predict runs/2026-11-15-1 --data day_2.click --out scores.csv
  tessera predict runs/2026-11-15-1 --best --data new.parquet --out s.parquet
  tessera predict runs/2026-11-15-2 --data new.xyz --out predicted.xyz

Scores every sample of a log with the model of a finished tessera train dlrm.
The file has a line of names, then one line per sample in the order of the log:
its number from 0, and the probability that its label is 1. Of tessera train gnn
it has the structures with energy, forces and stress as predicted. It appears
when it is whole.

  --data FILE     a log, or a table that the run's schema describes (CSV, Parquet,
                  ...), or extended XYZ. Labels may be missing.
  --out FILE      the file to write: CSV, or Parquet if it is named so; of gnn
                  extended XYZ
  --best          the best checkpoint by evaluation, not the final one
  --step N        this checkpoint
  -n, --ranks N   processes, which hold the tables together (1)
  --batch N       samples per rank at a time (the run's)
  --json          one JSON object

Exit codes: 0 good, 2 wrong usage, 65 no such run, log or checkpoint, or one that does not fit.
More: docs/your_data.md
)";

void check_run(const std::string& verb, const EvalWords& words) {
  const std::string workload = workload_of(words.run);
  if (!std::filesystem::exists(words.run + "/" + workloads::report::kConfigFile) ||
      workload.empty()) {
    throw LaunchError(launch::kExitData, verb + ": there is no run in " + words.run,
                      "config.toml or metrics.jsonl, which every run writes, is missing",
                      "name a folder that tessera train has made");
  }
  if (workload != "dlrm" && workload != "gnn" && (workload != "lm" || verb == "predict")) {
    throw LaunchError(launch::kExitData, verb + ": " + words.run + " is a run of " + workload,
                      workload == "lm" ? "what a language model writes is text"
                                       : "workloads of one's own judge in training",
                      workload == "lm" ? "tessera train lm --resume " + words.run +
                                             " --steps N --sample 60 writes some"
                                       : "name a folder that tessera train has made");
  }
  if (workload == "gnn" && verb == "predict" &&
      (words.out.ends_with(".csv") || words.out.ends_with(".parquet"))) {
    throw UsageError("predict: structures are written as extended XYZ, not as " + words.out +
                     ": name it .xyz");
  }
  const bool is_pattern = words.data.find_first_of("*?[,") != std::string::npos;
  if (!words.data.empty() && words.data != "synthetic" && !is_pattern &&
      !std::filesystem::exists(words.data)) {
    throw LaunchError(launch::kExitData, verb + ": there is no file " + words.data,
                      "--data names it",
                      workload == "dlrm" ? "name a log, as tessera data convert makes it"
                                         : "name a file of the kind that the run was trained on");
  }
}

// Before anything is scored: the data, the run and its checkpoints stay as they are.
void check_apart(const EvalWords& words) {
  namespace fs = std::filesystem;
  try {
    std::vector<std::string> inputs = workloads::data::files_of(words.data);
    for (const char* name :
         {workloads::report::kConfigFile, workloads::report::kMetricsFile, "schema.toml"}) {
      inputs.push_back(words.run + "/" + name);
    }
    for (const char* name : {"/checkpoints", "/best"}) {
      std::error_code error;  // a run may have kept none
      fs::recursive_directory_iterator folder(words.run + name, error);
      for (; !error && folder != fs::end(folder); folder.increment(error)) {
        inputs.push_back(folder->path().string());
      }
    }
    workloads::data::check_apart(inputs, words.out);
  } catch (const workloads::data::DataError& error) {
    throw LaunchError(launch::kExitData, std::string("predict: ") + error.what(),
                      "--data names what is scored, --out what is written",
                      "another --data, or another --out");
  }
}

// A table becomes a log by the schema of the run, and the ranks are told that.
void use_log(const std::string& verb, const EvalWords& given, std::vector<std::string>& words) {
  const std::string schema = given.run + "/schema.toml";
  if (!workloads::data::is_table(given.data) || !std::filesystem::exists(schema)) return;
  // Tables that grow take ids as the files have them.
  const std::string config = given.run + "/" + workloads::report::kConfigFile;
  for (const auto& one :
       settings::settings_in(verb, config, workloads::report::read_text(config))) {
    if (one.key == "ids" && one.value == "unlimited") return;
  }
  workloads::data::TableOptions options;
  options.label_may_miss = verb == "predict";
  const std::string log = say_converted(verb, given.data, schema, options);
  words.insert(words.end(), {"--data", log});
}

int run(const std::string& verb, std::string_view help, const std::vector<std::string>& words) {
  const EvalWords given = read_eval_words(verb, words);
  if (given.wants_help) return print_help(help);
  if (verb == "predict" && (given.data.empty() || given.out.empty())) {
    throw UsageError("predict: needs --data LOG and --out FILE");
  }
  check_run(verb, given);
  if (verb == "predict") check_apart(given);
  std::vector<std::string> told = words;
  use_log(verb, given, told);
  launch::RunOptions options;
  options.num_local_ranks = given.ranks;
  share_cores(options.num_local_ranks);
  options.prefix_lines = false;
  options.can_keep_output = false;
  options.use_python = false;
  options.command = {worker_program(verb), verb};
  options.command.insert(options.command.end(), told.begin(), told.end());
  return launch::run_job(options);
}

int run_eval(const std::vector<std::string>& words) { return run("eval", kEvalHelp, words); }
int run_predict(const std::vector<std::string>& words) {
  return run("predict", kPredictHelp, words);
}

template <bool predicts>
std::vector<std::string> flags() {
  CLI::App app("", "eval");
  EvalWords words;
  define_flags(app, words, predicts);
  return long_flags(app);
}

}  // namespace

const Verb kEvalVerb{"eval", "measure the model of a run", kEvalHelp, run_eval, flags<false>};
const Verb kPredictVerb{"predict", "score samples with the model of a run", kPredictHelp,
                        run_predict, flags<true>};

}  // namespace tessera::cli
