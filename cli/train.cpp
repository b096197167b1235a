// tessera train — trains a built-in workload, starting its own ranks.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>

#include "flags.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/job.h"
#include "usage.h"
#include "verb.h"
#include "worker/progress_line.h"
#include "worker_program.h"
#include "workload.h"

namespace tessera::cli {
namespace {

// From SIGTERM on: a step has to end and a checkpoint to be written.
constexpr std::chrono::seconds kTimeToSave{30};
constexpr const Workload* kWorkloads[] = {&kDlrmWorkload, &kLmWorkload, &kGnnWorkload};

constexpr std::string_view kHelp =
    R"(tessera train <workload> [flags]

  tessera train dlrm --ranks 2      clicks: tables over two ranks, and a report
  tessera train lm --ranks 2        a small GPT, its vocabulary over two ranks
  tessera train gnn --ranks 2       energies and forces of atoms, one graph over two ranks

workloads
  dlrm   recommender: embedding tables over all ranks, dense layers on each
  lm     language model: vocabulary and batch over a mesh
  gnn    message passing: the graph and the structures over a mesh

tessera train <workload> --help shows the flags of one.
More: docs/train_your_own.md, docs/vocab_parallel.md, docs/graph_parallel.md
)";

int run(const std::vector<std::string>& words) {
  if (words.empty()) throw UsageError("train: name a workload, as in tessera train lm");
  if (words[0] == "--help" || words[0] == "-h") return print_help(kHelp);
  const auto found =
      std::find_if(std::begin(kWorkloads), std::end(kWorkloads),
                   [&](const Workload* workload) { return workload->name == words[0]; });
  if (found == std::end(kWorkloads)) {
    throw UsageError("train: there is no workload '" + words[0] + "'" +
                     suggestion(words[0], {"dlrm", "lm", "gnn"}));
  }
  const Workload& workload = **found;
  std::vector<std::string> flags(words.begin() + 1, words.end());
  for (std::string& word : flags) word = with_dashes(word);  // the ranks know no other form
  const int num_ranks = workload.read(flags);
  if (num_ranks == 0) return launch::kExitOk;
  // The ranks see a pipe whatever this program writes to.
  if (isatty(STDOUT_FILENO) == 1) {
    setenv(kTerminalVariable, "1", /*overwrite=*/1);
  } else {
    unsetenv(kTerminalVariable);
  }
  launch::RunOptions options;
  options.num_local_ranks = num_ranks;
  options.prefix_lines = false;
  options.use_python = false;
  options.shutdown_timeout = kTimeToSave;
  options.command = {worker_program("train"), std::string(workload.worker_verb)};
  options.command.insert(options.command.end(), flags.begin(), flags.end());
  return launch::run_job(options);
}

std::vector<std::string> flags() {
  std::set<std::string> all;
  for (const Workload* workload : kWorkloads) {
    for (std::string& flag : workload->flags()) all.insert(std::move(flag));
  }
  return {all.begin(), all.end()};
}

}  // namespace

const Verb kTrainVerb{"train", "train a built-in workload: dlrm, lm, gnn", kHelp, run, flags};

}  // namespace tessera::cli
