#include "gnn/settings.h"

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::workloads::gnn {
namespace {

constexpr const char* kHead =
    R"(tessera train gnn [flags]

  tessera train gnn --ranks 2                              one graph over two ranks
  tessera train gnn --ranks 4 --graph-parallel 2           two pairs, different structures each
  tessera train gnn --ranks 4 --atoms 4096 --partition morton
  tessera train gnn --data 'md-*.xyz' --cutoff 5 --stress-weight 10 --steps 2000

Trains a message-passing network on energies, forces and stress of atoms:
those of extended XYZ files, or of Lennard-Jones-like boxes that the program
makes itself. Forces are derivatives of the energy, so training goes through
second derivatives, over all ranks.

)";

constexpr std::int64_t kLarge = std::int64_t{1} << 40;

}  // namespace

Settings::Settings() { learning_rate = 0.003; }

settings::Table Settings::table() {
  settings::Table table(kHead, "More: docs/graph_parallel.md, docs/report.md\n");
  add_ranks(table);
  add_device(table);
  table
      .add("graph-parallel", graph_parallel, "G",
           "ranks that share one graph; the rest see other structures")
      .range(0, 4096)
      .shown("all");
  table.add("partition", partition, "P", "")
      .one_of({"contiguous", "morton", "hilbert", "bisection", "metis"});
  table.group("data");
  table.add("atoms", num_atoms, "N", "per structure").range(1, 1 << 30).fixed();
  table.add("structures", num_structures, "N", "for training; a quarter as many to judge")
      .range(1, 1 << 20)
      .fixed();
  table.add("data", data, "FILES", "extended XYZ instead; several, and patterns").fixed();
  table.add("eval-data", eval_data, "FILES", "judge on these, not on the last tenth").told();
  table.add("energy-key", energy_key, "K", "of the files").fixed();
  table.add("forces-key", forces_key, "K", "").fixed().beside();
  table.add("stress-key", stress_key, "K", "").fixed().beside();
  table.add("cutoff", cutoff, "R", "how far atoms see, in the unit of positions")
      .not_negative()
      .check([](const std::string& text) {
        return std::stod(text) > 0 ? "" : "Number less or equal to 0: " + text;
      })
      .fixed();
  table.group("training");
  table.add("steps", num_steps, "N", "steps").range(0, kLarge);
  table.add("batch", batch, "N", "structures per step and data-parallel rank")
      .range(1, 1 << 20)
      .beside();
  table.add("epochs", epochs, "N", "through the structures, not --steps")
      .range(0, kLarge)
      .shown("")
      .told();
  table.add("shuffle", shuffle, "", "in another order each time").told().beside();
  table.add("optimizer", optimizer, "O", "").one_of({"adam", "sgd"}).fixed();
  table.add("lr", learning_rate, "X", "learning rate").not_negative().told().beside();
  add_schedule(table);
  table.add("force-weight", force_weight, "X", "of forces beside energies").not_negative().told();
  table.add("stress-weight", stress_weight, "X", "of stress").not_negative().told().beside();
  table.add("features", num_features, "N", "of the network").range(1, 1 << 14).fixed();
  table.add("layers", num_layers, "N", "its layers").range(1, 64).fixed().beside();
  table.add("precision", precision, "P", "").one_of({"float32", "float64"}).fixed();
  table.add("no-overlap", no_overlap, "", "wait for halo rows before computing");
  table.add("eval-every", eval_every, "N", "steps (0: at the end)").range(0, kLarge).shown("");
  table.add("patience", patience, "N", "evaluations without a better one end it (0: never)")
      .range(0, kLarge)
      .shown("");
  add_checkpoints(table);
  add_seed(table, "of structures and parameters");
  add_output(table);
  return table;
}

void Settings::check() const {
  trainer::Settings::check();
  if (stress_weight > 0 && data.empty()) {
    throw launch::LaunchError(launch::kExitConfiguration,
                              "train: --stress-weight is for structures of --data",
                              "those that the program makes have no stress to learn",
                              "name files with --data, or leave --stress-weight out");
  }
  if (num_ranks % graph_ranks() == 0) return;
  throw launch::LaunchError(launch::kExitConfiguration,
                            "train: " + std::to_string(num_ranks) +
                                " ranks cannot be divided into groups of " +
                                std::to_string(graph_ranks()),
                            "every graph is shared by the same number of ranks",
                            "choose --graph-parallel so that it divides --ranks");
}

}  // namespace tessera::workloads::gnn
