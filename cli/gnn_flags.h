// cli/gnn_flags.h — the flags of `tessera train gnn` and `tessera plan graph`.
//
// `tessera` reads them to find mistakes before anything is started; `tessera-worker` reads them
// again.

#pragma once

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "flag_checks.h"

namespace tessera::cli {

struct TrainGnnWords {
  int num_ranks = 1;
  int graph_parallel = 0;  // 0: all ranks
  std::string partition = "bisection";
  std::int64_t num_atoms = 216;
  std::int64_t num_structures = 16;
  std::int64_t num_steps = 200;
  std::int64_t batch = 1;
  std::int64_t num_features = 32;
  std::int64_t num_layers = 2;
  double cutoff = 2.2;
  double learning_rate = 0.003;
  double force_weight = 1.0;
  std::string optimizer = "adam";
  std::string precision = "float32";
  std::int64_t seed = 1;
  bool no_overlap = false;
  bool as_json = false;
  bool print_config = false;
  bool wants_help = false;
};

inline void define_flags(CLI::App& app, TrainGnnWords& words) {
  app.set_help_flag();
  const auto value = [&](const char* name, auto& target) {
    return app.add_option(name, target)->capture_default_str()->take_last();
  };
  value("-n,--ranks", words.num_ranks)->check(CLI::Range(1, 4096));
  value("--graph-parallel", words.graph_parallel)->check(CLI::Range(0, 4096));
  value("--partition", words.partition)
      ->check(CLI::IsMember({"contiguous", "morton", "hilbert", "bisection", "metis"}));
  value("--atoms", words.num_atoms)->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 30));
  value("--structures", words.num_structures)->check(CLI::Range(1, 1 << 20));
  value("--steps", words.num_steps)->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  value("--batch", words.batch)->check(CLI::Range(1, 1 << 20));
  value("--features", words.num_features)->check(CLI::Range(1, 1 << 14));
  value("--layers", words.num_layers)->check(CLI::Range(1, 64));
  value("--cutoff", words.cutoff)->check(CLI::PositiveNumber)->check(not_negative());
  value("--lr", words.learning_rate)->check(not_negative());
  value("--force-weight", words.force_weight)->check(not_negative());
  value("--optimizer", words.optimizer)->check(CLI::IsMember({"adam", "sgd"}));
  value("--precision", words.precision)->check(CLI::IsMember({"float32", "float64"}));
  value("--seed", words.seed)->check(not_negative())->check(seed_range());
  app.add_flag("--no-overlap", words.no_overlap);
  app.add_flag("--json", words.as_json);
  app.add_flag("--print-config", words.print_config)->configurable(false);
  app.add_flag("-h,--help", words.wants_help)->configurable(false);
  app.set_config("--config")->configurable(false);
  app.allow_config_extras(false);
}

struct PlanGraphWords {
  int num_parts = 8;
  double cutoff = 0;  // 0: use the nearest
  std::int64_t num_nearest = 20;
  std::int64_t num_features = 128;
  int element_bytes = 4;
  bool weigh_edges = false;
  bool as_json = false;
  bool wants_help = false;
};

inline void define_flags(CLI::App& app, PlanGraphWords& words) {
  app.set_help_flag();
  const auto value = [&](const char* name, auto& target) {
    return app.add_option(name, target)->capture_default_str()->take_last();
  };
  value("-n,--ranks", words.num_parts)->check(CLI::Range(1, 1 << 16));
  value("--cutoff", words.cutoff)->check(not_negative());
  value("--nearest", words.num_nearest)->check(CLI::Range(1, 1 << 16));
  value("--features", words.num_features)->check(CLI::Range(1, 1 << 20));
  value("--element-bytes", words.element_bytes)->check(CLI::IsMember({1, 2, 4, 8}));
  app.add_flag("--weigh-edges", words.weigh_edges);
  app.add_flag("--json", words.as_json);
  app.add_flag("-h,--help", words.wants_help);
}

}  // namespace tessera::cli
