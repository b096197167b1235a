// tessera run — starts the ranks of a program, on this host or on several.

#include <cstdio>
#include <stdexcept>

#include "flags.h"
#include "host_flags.h"
#include "tessera/launch/job.h"
#include "tessera/launch/options.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera run [flags] [--] program [arguments]

  tessera run -n 4 -- ./train --epochs 3        four ranks on this host
  tessera run -n 2 train.py                     Python, by the python3 of PATH
  tessera run -n 4 --max-restarts 3 --log-dir runs -- ./train
  tessera run -n 8 --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 \
      --secret-file job.secret -- ./train

ranks
  -n, --nproc-per-node N    ranks on this host: a number, auto, cpu or gpu (1)
  -m, --module              program is a Python module
  --no-python               execute a *.py file itself
  --max-restarts K          after a failure start all again, at most K times (0)
hosts
  --nnodes K --node-rank R  K hosts in all, this is the R-th, counted from 0
  --rdzv-endpoint H:P       where node 0 listens; on one host, the store
  --master-addr, --master-port   the same in two words
  --rdzv-id ID              hosts with another id are refused
  --secret-file FILE        what hosts prove to each other; mode 0600
  --insecure-no-auth        several hosts without a secret: anyone may join
  --rdzv-timeout S          wait this long for the other hosts (600)
  --standalone              one host, loopback only: the default
output
  --log-dir DIR             keep output and error.json in DIR/<run>/attempt_K
  --tee, --redirects V      to console and file, or file only: 0 none, 1 stdout,
                            2 stderr, 3 both, or for each rank as in 0:3,1:2
  --local-ranks-filter L    show only these local ranks, as in 0,2
  --no-prefix               lines without [rank N]
  --json                    the failure report as one line of JSON
ending
  --shutdown-timeout S      from SIGTERM to SIGKILL (10)
  --failure-grace S         others may end by themselves this long after a
                            failure (0.03 if the ranks use the store, else 0)
configuration
  --config FILE             flags from a TOML file; --print-config shows them
  --role NAME --rdzv-backend B --rdzv-conf C --monitor-interval S
  --start-method M          accepted as torchrun does
More: docs/launch.md
)";

// The words as given; they get their meaning, and their errors, in `options_from`.
struct Words {
  std::string num_local_ranks = "1";
  HostWords hosts;
  std::string max_restarts = "0";
  std::string role = "default";
  std::string log_dir;
  std::string tee;
  std::string redirects;
  std::string shown_ranks;
  std::string shutdown_timeout = "10";
  std::string failure_grace;
  std::string monitor_interval = "0.1";
  std::string start_method = "spawn";
  bool is_module = false;
  bool no_python = false;
  bool no_prefix = false;
  bool json_report = false;
  bool print_config = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  app.set_help_flag();
  const auto value = [&](const char* name, std::string& target) {
    app.add_option(name, target)->capture_default_str()->take_last();
  };
  value("-n,--nproc-per-node", words.num_local_ranks);
  define_host_flags(app, words.hosts);
  value("--max-restarts", words.max_restarts);
  value("--role", words.role);
  value("--log-dir", words.log_dir);
  value("--tee,-t", words.tee);
  value("--redirects,-r", words.redirects);
  value("--local-ranks-filter", words.shown_ranks);
  value("--shutdown-timeout", words.shutdown_timeout);
  value("--failure-grace", words.failure_grace);
  value("--monitor-interval", words.monitor_interval);
  value("--start-method", words.start_method);
  app.add_flag("-m,--module", words.is_module);
  app.add_flag("--no-python", words.no_python);
  app.add_flag("--no-prefix", words.no_prefix);
  app.add_flag("--json", words.json_report);
  app.add_flag("--print-config", words.print_config)->configurable(false);
  app.add_flag("-h,--help", words.wants_help)->configurable(false);
  app.set_config("--config")->configurable(false);
  app.allow_config_extras(false);
}

// Gives the name of the flag to a message about its value.
template <class Parse>
auto parsed(const char* flag, Parse parse) {
  return parsed_value("run", flag, parse);
}

void read_output(const Words& words, launch::RunOptions& options) {
  options.log_dir = words.log_dir;
  if (!words.tee.empty()) {
    options.tee = parsed("--tee", [&] { return launch::parse_stream_rule(words.tee); });
  }
  if (!words.redirects.empty()) {
    options.redirects =
        parsed("--redirects", [&] { return launch::parse_stream_rule(words.redirects); });
    if (!options.redirects.is_empty() && options.log_dir.empty()) {
      throw UsageError("run: --redirects needs --log-dir DIR to write to");
    }
  }
  if (!words.shown_ranks.empty()) {
    options.shown_local_ranks =
        parsed("--local-ranks-filter", [&] { return launch::parse_rank_list(words.shown_ranks); });
  }
  options.prefix_lines = !words.no_prefix;
  options.json_report = words.json_report;
}

launch::RunOptions options_from(const Words& words, const std::vector<std::string>& command) {
  launch::RunOptions options;
  options.num_local_ranks =
      parsed("--nproc-per-node", [&] { return launch::parse_rank_count(words.num_local_ranks); });
  read_hosts("run", words.hosts, options);
  read_output(words, options);
  options.max_restarts = parsed(
      "--max-restarts", [&] { return launch::parse_integer(words.max_restarts, 0, 1 << 20); });
  options.shutdown_timeout =
      parsed("--shutdown-timeout", [&] { return launch::parse_seconds(words.shutdown_timeout); });
  if (!words.failure_grace.empty()) {
    options.failure_grace =
        parsed("--failure-grace", [&] { return launch::parse_seconds(words.failure_grace); });
  }
  parsed("--monitor-interval", [&] { return launch::parse_seconds(words.monitor_interval); });
  if (words.start_method != "spawn" && words.start_method != "fork" &&
      words.start_method != "forkserver") {
    throw UsageError("run: --start-method: '" + words.start_method +
                     "' is not spawn, fork or forkserver");
  }
  options.role = words.role;
  options.is_module = words.is_module;
  options.use_python = !words.no_python;
  options.command = command;
  return options;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "run");
  Words given;
  define_flags(app, given);
  const SplitWords split = split_words(app, words);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  const launch::RunOptions options = options_from(given, split.rest);
  if (given.print_config) return print_config(app);
  if (options.command.empty()) {
    throw UsageError("run: no program given; write it last, as in tessera run -n 2 -- ./train");
  }
  return launch::run_job(options);
}

std::vector<std::string> flags() {
  CLI::App app("", "run");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

std::map<std::string, std::string> values() {
  return {{"--nproc-per-node", "auto cpu gpu"}, {"--tee", "0 1 2 3"}, {"--redirects", "0 1 2 3"}};
}

}  // namespace

const Verb kRunVerb{
    "run", "start the ranks of a program, watch them, restart them", kHelp, run, flags, "", values};

}  // namespace tessera::cli
