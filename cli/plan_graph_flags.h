// cli/plan_graph_flags.h — the flags of `tessera plan graph`.
//
// `tessera` reads them to find mistakes before anything is started; `tessera-worker` reads them
// again.

#pragma once

#include <cstdint>

#include "settings/table.h"

namespace tessera::cli {

struct PlanGraphWords {
  int num_parts = 8;
  double cutoff = 0;  // 0: use the nearest
  std::int64_t num_nearest = 20;
  std::int64_t num_features = 128;
  int element_bytes = 4;
  bool weigh_edges = false;
  bool as_json = false;
  bool wants_help = false;

  settings::Table table() {
    settings::Table table(
        R"(tessera plan graph [flags] FILE

  tessera plan graph --ranks 16 water.xyz                  20 nearest neighbours per atom
  tessera plan graph --ranks 16 --cutoff 6.0 water.xyz     all pairs closer than 6
  tessera plan graph --ranks 4 citations.txt               an edge list: two numbers per line

Compares the partitioners on one graph: rows each rank owns, rows it receives per layer (mean and
largest over ranks), edges it can work on before and after they arrive, bytes per layer on the
busiest rank, and the edges of the busiest rank over the mean.

)",
        R"(
Files: extended XYZ with Lattice="..." and pbc="T T T", or an edge list.
Exit codes: 0 good, 2 wrong usage, 65 the file cannot be used. More: docs/graph_parallel.md
)");
    table.add("ranks", num_parts, "N", "parts to cut the graph into")
        .range(1, 1 << 16)
        .short_flag('n');
    table.add("nearest", num_nearest, "K", "for atoms: neighbours of each").range(1, 1 << 16);
    table.add("cutoff", cutoff, "R", "for atoms: all pairs closer than R instead")
        .not_negative()
        .shown("");
    table.add("features", num_features, "N", "width of a row").range(1, 1 << 20);
    table.add("element-bytes", element_bytes, "N", "of an element").one_of({"1", "2", "4", "8"});
    table.add_switch("weigh-edges", weigh_edges, "balance edges instead of nodes");
    table.add_switch("json", as_json, "one JSON object");
    table.add_switch("help", wants_help, "").short_flag('h');
    return table;
  }
};

}  // namespace tessera::cli
