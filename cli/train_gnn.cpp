// tessera train gnn — the flags of this workload and their meaning.

#include "flags.h"
#include "gnn_flags.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "workload.h"
#include "workload_flags.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera train gnn [flags]

  tessera train gnn --ranks 2                              one graph over two ranks
  tessera train gnn --ranks 4 --graph-parallel 2           two pairs, different structures each
  tessera train gnn --ranks 4 --atoms 4096 --partition morton

Trains a message-passing network on energies and forces of atoms in periodic boxes, which the
program makes itself (Lennard-Jones-like). Forces are derivatives of the energy, so training goes
through second derivatives, over all ranks.

ranks
  -n, --ranks N             processes on this host (1)
  --graph-parallel G        ranks that share one graph; the rest see other structures (all)
  --partition P             contiguous, morton, hilbert, bisection or metis (bisection)
data
  --atoms N                 per structure (216)
  --structures N            for training; a quarter as many to judge (16)
  --cutoff R                how far atoms see, in sigmas (2.2)
training
  --steps N --batch N       steps (200), structures per step and data-parallel rank (1)
  --lr X --optimizer O      learning rate (0.003), adam or sgd
  --force-weight X          of forces beside energies (1)
  --features N --layers N   of the network (32, 2)
  --precision P             float32 or float64
  --no-overlap              wait for halo rows before computing
  --seed N                  of structures and parameters (1)
output
  --json                    one JSON object at the end
  --config FILE             read flags from a TOML file; --print-config shows the result
More: docs/graph_parallel.md
)";

void check_mesh(const TrainGnnWords& given) {
  const int size = given.graph_parallel == 0 ? given.num_ranks : given.graph_parallel;
  if (given.num_ranks % size == 0) return;
  throw launch::LaunchError(launch::kExitConfiguration,
                            "train: " + std::to_string(given.num_ranks) +
                                " ranks cannot be divided into groups of " + std::to_string(size),
                            "every graph is shared by the same number of ranks",
                            "choose --graph-parallel so that it divides --ranks");
}

int read(const std::vector<std::string>& words) {
  return read_words<TrainGnnWords>(words, kHelp, check_mesh);
}

}  // namespace

const Workload kGnnWorkload{"gnn", "train-gnn", kHelp, read, flags_of<TrainGnnWords>};

}  // namespace tessera::cli
