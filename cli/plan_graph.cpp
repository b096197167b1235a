// tessera plan graph — the partitioners on one graph.

#include "flags.h"
#include "gnn_flags.h"
#include "plan_subject.h"
#include "usage.h"
#include "worker_program.h"

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
  const NamesAndFlags sorted = names_and_flags(app, words);
  read_flags(app, sorted.flags);
  if (given.wants_help) return print_help(kHelp);
  if (sorted.names.size() != 1)
    throw UsageError("plan: name one file, as in tessera plan graph FILE");
  std::vector<std::string> command{"plan-graph", sorted.names[0]};
  command.insert(command.end(), sorted.flags.begin(), sorted.flags.end());
  become_worker("plan", std::move(command));
}

std::vector<std::string> flags() {
  CLI::App app("", "plan");
  PlanGraphWords words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace

const PlanSubject kPlanGraph{"graph", kHelp, run, flags};

}  // namespace tessera::cli
