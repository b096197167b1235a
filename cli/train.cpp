// tessera train — trains a built-in workload, starting its own ranks.

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>

#include "converted_data.h"
#include "data/converted.h"
#include "data/input.h"
#include "dlrm/click_file.h"
#include "dlrm/settings.h"
#include "doctor/machine.h"
#include "flags.h"
#include "gnn/settings.h"
#include "host_flags.h"
#include "lm/settings.h"
#include "report/run_facts.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/job.h"
#include "tessera/launch/launch_error.h"
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

// A run counts the ranks of all hosts, a call those of its own: the words are made to say the
// former. Returns the ranks of this host; 0 if no word says how many.
int use_all_ranks(std::vector<std::string>& words, int num_hosts) {
  if (num_hosts == 1) return 0;
  std::string value;
  std::vector<std::string> left;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const bool is_flag =
        words[i] == "--ranks" || words[i] == "-n" || words[i] == "--nproc-per-node";
    if (is_flag && i + 1 < words.size()) {
      value = words[++i];
    } else if (words[i].starts_with("--ranks=") || words[i].starts_with("--nproc-per-node=")) {
      value = words[i].substr(words[i].find('=') + 1);
    } else {
      left.push_back(words[i]);
    }
  }
  const bool resumes = std::any_of(words.begin(), words.end(), [](const std::string& word) {
    return word.starts_with("--resume") || word.starts_with("--config");
  });
  if (value.empty() && resumes) return 0;
  const int ranks = parsed_value("train", "--ranks", [&] {
    return launch::parse_integer(value.empty() ? "1" : value, 1, 4096);
  });
  words = std::move(left);
  words.insert(words.end(), {"--ranks", std::to_string(ranks * num_hosts)});
  return ranks;
}

// Of the ranks that a configuration names, those of one host.
int share_of_host(const trainer::Settings& settings, int num_hosts) {
  if (settings.num_ranks % num_hosts == 0) return settings.num_ranks / num_hosts;
  throw launch::LaunchError(
      launch::kExitConfiguration,
      "train: " + std::to_string(settings.num_ranks) + " ranks cannot be divided over " +
          std::to_string(num_hosts) + " hosts",
      "the configuration names the ranks of all hosts", "--ranks N, the ranks of each host");
}

// The words with this value of a flag, whatever they said before.
void set_value(std::vector<std::string>& words, const std::string& flag, const std::string& value) {
  std::vector<std::string> left;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == flag) {
      ++i;  // its value
    } else if (!words[i].starts_with(flag + "=")) {
      left.push_back(words[i]);
    }
  }
  left.insert(left.end(), {flag, value});
  words = std::move(left);
}

// Standard input is read to its end: its last samples are those to judge on, and epochs begin anew.
// The ranks, the run's configuration and a resume know the log alone.
void read_standard_input(workloads::dlrm::Settings& settings, std::vector<std::string>& flags,
                         int num_hosts) {
  if (num_hosts > 1) {
    throw launch::LaunchError(
        launch::kExitConfiguration, "train: --data - is for one host",
        "each of the " + std::to_string(num_hosts) + " hosts has a standard input of its own",
        "tessera data convert - onto a disk that all of them see");
  }
  settings.data = say_converted_input("train", settings.schema);
  set_value(flags, "--data", settings.data);
}

// Criteo's text, of which the ranks say what is wrong; that there is none, they need not be started
// for.
void check_names(const std::string& data) {
  namespace fs = std::filesystem;
  const std::vector<std::string> files = workloads::data::files_of(data);
  const auto missing = std::find_if(files.begin(), files.end(),
                                    [](const std::string& file) { return !fs::exists(file); });
  if (missing != files.end())
    throw workloads::data::DataError(*missing + ": there is no such file.");
  if (files.empty()) throw workloads::data::DataError(data + ": names no file.");
}

// Tables become a log before the ranks are started: once, on this host. Its features are compared
// with the flags.
void convert_data(workloads::dlrm::Settings& settings, std::vector<std::string>& flags,
                  int num_hosts) {
  // Tables that grow take ids as the files have them.
  if (settings.is_unlimited()) return;
  if (settings.data == "-") read_standard_input(settings, flags, num_hosts);
  for (const std::string& data : {settings.data, settings.eval_data}) {
    std::string log = data;
    const bool is_table = workloads::data::is_table(data);
    if (is_table && !settings.schema.empty()) {
      log = say_converted("train", data, settings.schema, {});
    }
    if (log.empty() || log == "synthetic") continue;
    try {
      if (is_table && settings.schema.empty()) {
        check_names(data);
        continue;
      }
      settings.check_tables(workloads::dlrm::ClickFile(log).schema());
    } catch (const workloads::data::DataError& error) {
      throw launch::LaunchError(launch::kExitData, "train: " + data + " cannot be read",
                                error.what(), "tessera data check " + data + " says more");
    }
  }
}

constexpr std::string_view kHelp =
    R"(tessera train <workload> [flags]

  tessera train dlrm --ranks 2      clicks: tables over two ranks, and a report
  tessera train lm --ranks 2        a small GPT, its vocabulary over two ranks
  tessera train gnn --ranks 2       energies and forces of atoms, one graph over two ranks

workloads
  dlrm   recommender: embedding tables over all ranks, dense layers on each
  lm     language model: vocabulary and batch over a mesh
  gnn    message passing: the graph and the structures over a mesh

hosts, as for tessera run: the same command on each, --ranks are those of each
  --nnodes K --node-rank R --rdzv-endpoint H:P --secret-file FILE
  --master-addr --master-port --rdzv-id --rdzv-timeout --rdzv-backend
  --rdzv-conf --standalone --insecure-no-auth
  The run folder is on a disk that all of them see.

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
  launch::RunOptions options;
  read_hosts("train", take_host_flags("train", flags), options);
  const int local_ranks = use_all_ranks(flags, options.num_nodes);
  // To find mistakes before anything is started; the ranks read them again.
  const auto given = found->settings();
  trainer::read(*given, *found->settings(), flags, /*tells=*/options.node_rank == 0);
  if (given->wants_help) return print_help(found->settings()->table().help());
  if (given->print_config) return print_help(given->table().config());
  if (auto* dlrm = dynamic_cast<workloads::dlrm::Settings*>(given.get())) {
    convert_data(*dlrm, flags, options.num_nodes);
  }
  // The ranks see a pipe whatever this program writes to.
  if (isatty(STDOUT_FILENO) == 1) {
    winsize size{};
    ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
    setenv(trainer::kTerminalVariable, std::to_string(size.ws_col).c_str(), /*overwrite=*/1);
  } else {
    unsetenv(trainer::kTerminalVariable);
  }
  options.num_local_ranks =
      local_ranks > 0 ? local_ranks : share_of_host(*given, options.num_nodes);
  std::vector<std::string> typed{"tessera", "train"};
  typed.insert(typed.end(), words.begin(), words.end());
  setenv(workloads::report::kCommandVariable, workloads::report::command_text(typed).c_str(),
         /*overwrite=*/1);
  share_cores(options.num_local_ranks);
  options.prefix_lines = false;
  options.can_keep_output = false;
  options.use_python = false;
  options.shutdown_timeout = kTimeToSave;
  options.passes_stdin = given->reads_stdin();
  options.command = {worker_program("train"), "train-" + words[0]};
  options.command.insert(options.command.end(), flags.begin(), flags.end());
  return launch::run_job(options);
}

std::vector<std::string> flags() {
  std::set<std::string> all;
  CLI::App hosts("", "train");
  HostWords words;
  hosts.set_help_flag();
  define_host_flags(hosts, words);
  for (std::string& flag : long_flags(hosts)) all.insert(std::move(flag));
  for (const Workload& workload : kWorkloads) {
    CLI::App app("", "train");
    const auto settings = workload.settings();
    define(app, settings->table());
    for (std::string& flag : long_flags(app)) all.insert(std::move(flag));
  }
  return {all.begin(), all.end()};
}

std::map<std::string, std::string> values() {
  // Of all workloads: each has other optimizers and precisions.
  std::map<std::string, std::vector<std::string>> all;
  for (const Workload& workload : kWorkloads) {
    const auto given = workload.settings();
    const settings::Table table = given->table();
    for (const settings::Setting& setting : table.settings()) {
      for (const std::string& choice : setting.choices) {
        std::vector<std::string>& words = all["--" + setting.name];
        if (std::find(words.begin(), words.end(), choice) == words.end()) words.push_back(choice);
      }
    }
  }
  std::map<std::string, std::string> texts;
  for (const auto& [flag, words] : all) {
    for (const std::string& word : words) texts[flag] += (texts[flag].empty() ? "" : " ") + word;
  }
  return texts;
}

}  // namespace

const Verb kTrainVerb{
    "train", "train a built-in workload: dlrm, lm, gnn", kHelp, run, flags, "dlrm lm gnn", values};

}  // namespace tessera::cli
