// tessera plan — prints and explains how something would be split.

#include <unistd.h>

#include <cstdio>

#include "flags.h"
#include "gnn_flags.h"
#include "launch/store_host.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera plan graph [flags] FILE

  tessera plan graph --ranks 16 water.xyz                  20 nearest neighbours per atom
  tessera plan graph --ranks 16 --cutoff 6.0 water.xyz     all pairs closer than 6
  tessera plan graph --ranks 4 citations.txt               an edge list: two numbers per line

Compares the partitioners on one graph: rows each rank owns, rows it receives per layer (mean and
largest over ranks), edges it can work on before and after they arrive, bytes per layer on the
busiest rank, and the edges of the busiest rank over the mean.

  -n, --ranks N             parts to cut the graph into (8)
  --nearest K               for atoms: neighbours of each (20)
  --cutoff R                for atoms: all pairs closer than R instead
  --features N              width of a row (128)
  --element-bytes N         bytes of an element: 1, 2, 4 or 8 (4)
  --weigh-edges             balance edges instead of nodes
  --json                    one JSON object

Files: extended XYZ with Lattice="..." and pbc="T T T", or an edge list.
Exit codes: 0 good, 2 wrong usage, 65 the file cannot be used. More: docs/graph_parallel.md
)";

int run(const std::vector<std::string>& words) {
  CLI::App app("", "plan");
  PlanGraphWords given;
  define_flags(app, given);
  if (words.empty()) throw UsageError("plan: name a subject, as in tessera plan graph FILE");
  if (words[0] == "--help" || words[0] == "-h") {
    std::fwrite(kHelp.data(), 1, kHelp.size(), stdout);
    return launch::kExitOk;
  }
  if (words[0] != "graph") {
    throw UsageError("plan: there is no subject '" + words[0] + "'" +
                     suggestion(words[0], {"graph"}));
  }
  // The file may stand before the flags as well.
  SplitWords split = split_words(app, {words.begin() + 1, words.end()});
  if (split.rest.size() > 1 && split.rest[1].starts_with('-')) {
    const SplitWords later = split_words(app, {split.rest.begin() + 1, split.rest.end()});
    split.flags.insert(split.flags.end(), later.flags.begin(), later.flags.end());
    split.rest.resize(1);
    split.rest.insert(split.rest.end(), later.rest.begin(), later.rest.end());
  }
  read_flags(app, split.flags);
  if (given.wants_help) {
    std::fwrite(kHelp.data(), 1, kHelp.size(), stdout);
    return launch::kExitOk;
  }
  if (split.rest.size() != 1)
    throw UsageError("plan: name one file, as in tessera plan graph FILE");
  const std::string worker = launch::find_worker_program();
  if (worker.empty()) {
    throw launch::LaunchError(launch::kExitNotFound, "plan: there is no tessera-worker program",
                              "it is not beside tessera, and TESSERA_WORKER does not name it",
                              "build it, or set TESSERA_WORKER to its path");
  }
  std::vector<std::string> command{worker, "plan-graph", split.rest[0]};
  command.insert(command.end(), split.flags.begin(), split.flags.end());
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execv(worker.c_str(), arguments.data());
  throw launch::LaunchError(launch::kExitNotExecutable, "plan: " + worker + " cannot be started",
                            "the system refused to execute it", "check its permissions");
}

std::vector<std::string> flags() {
  CLI::App app("", "plan");
  PlanGraphWords words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const Verb kPlanVerb{"plan", "compare ways to split a graph", kHelp, run, flags};

}  // namespace tessera::cli
