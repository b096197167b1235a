// tessera train — trains a built-in workload, starting its own ranks.

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <set>

#include "dlrm/settings.h"
#include "doctor/machine.h"
#include "flags.h"
#include "gnn/settings.h"
#include "lm/settings.h"
#include "report/run_facts.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/job.h"
#include "trainer/progress_line.h"
#include "usage.h"
#include "verb.h"
#include "worker_program.h"

namespace tessera::cli {
namespace {

// From SIGTERM on: a step has to end and a checkpoint to be written.
constexpr std::chrono::seconds kTimeToSave{30};

template <class Settings>
std::unique_ptr<trainer::Settings> make() {
  return std::make_unique<Settings>();
}

struct Workload {
  std::string_view name;
  std::unique_ptr<trainer::Settings> (*settings)();
};

constexpr Workload kWorkloads[] = {{"dlrm", make<workloads::dlrm::Settings>},
                                   {"lm", make<workloads::lm::Settings>},
                                   {"gnn", make<workloads::gnn::Settings>}};

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
  const auto* const found =
      std::find_if(std::begin(kWorkloads), std::end(kWorkloads),
                   [&](const Workload& workload) { return workload.name == words[0]; });
  if (found == std::end(kWorkloads)) {
    throw UsageError("train: there is no workload '" + words[0] + "'" +
                     suggestion(words[0], {"dlrm", "lm", "gnn"}));
  }
  std::vector<std::string> flags(words.begin() + 1, words.end());
  for (std::string& word : flags) word = with_dashes(word);  // the ranks know no other form
  // To find mistakes before anything is started; the ranks read them again.
  const auto given = found->settings();
  trainer::read(*given, *found->settings(), flags);
  if (given->wants_help) return print_help(found->settings()->table().help());
  if (given->print_config) return print_help(given->table().config());
  // The ranks see a pipe whatever this program writes to.
  if (isatty(STDOUT_FILENO) == 1) {
    winsize size{};
    ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    setenv(trainer::kTerminalVariable, std::to_string(size.ws_col).c_str(), /*overwrite=*/1);
  } else {
    unsetenv(trainer::kTerminalVariable);
  }
  std::vector<std::string> typed{"tessera", "train"};
  typed.insert(typed.end(), words.begin(), words.end());
  setenv(workloads::report::kCommandVariable, workloads::report::command_text(typed).c_str(),
         /*overwrite=*/1);
  // What the user says counts; otherwise ranks share the cores that this process may use.
  const int share = std::max(1, cores_left(read_machine()) / given->num_ranks);
  setenv("OMP_NUM_THREADS", std::to_string(share).c_str(), /*overwrite=*/0);
  launch::RunOptions options;
  options.num_local_ranks = given->num_ranks;
  options.prefix_lines = false;
  options.use_python = false;
  options.shutdown_timeout = kTimeToSave;
  options.passes_stdin = given->reads_stdin();
  options.command = {worker_program("train"), "train-" + words[0]};
  options.command.insert(options.command.end(), flags.begin(), flags.end());
  return launch::run_job(options);
}

std::vector<std::string> flags() {
  std::set<std::string> all;
  for (const Workload& workload : kWorkloads) {
    CLI::App app("", "train");
    const auto settings = workload.settings();
    define(app, settings->table());
    for (std::string& flag : long_flags(app)) all.insert(std::move(flag));
  }
  return {all.begin(), all.end()};
}

std::map<std::string, std::string> values() {
  std::map<std::string, std::string> all;
  for (const Workload& workload : kWorkloads) {
    const auto settings = workload.settings();
    for (const auto& setting : settings->table().settings()) {
      std::string words;
      for (const std::string& choice : setting.choices)
        words += (words.empty() ? "" : " ") + choice;
      if (!words.empty()) all["--" + setting.name] = words;
    }
  }
  return all;
}

}  // namespace

const Verb kTrainVerb{
    "train", "train a built-in workload: dlrm, lm, gnn", kHelp, run, flags, "dlrm lm gnn", values};

}  // namespace tessera::cli
