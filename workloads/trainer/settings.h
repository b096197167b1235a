// trainer/settings.h — what every training can be told: ranks, steps, schedule, checkpoints, where
// things are written. No LibTorch.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "settings/table.h"
#include "tessera/core/export.h"

namespace tessera::trainer {

/// A workload derives from it, adds what is its own, and writes all of it into one table.
struct TESSERA_API Settings {
  int num_ranks = 1;
  std::string device = "cpu";  // or "cuda": a GPU per rank, chosen by LOCAL_RANK
  bool share_gpus = false;     // more ranks than GPUs are no mistake
  int threads = 0;             // of each rank; 0: OMP_NUM_THREADS, or its share of the cores
  std::int64_t batch = 1;      // samples per step and data-parallel rank
  std::int64_t num_steps = 200;
  double learning_rate = 0.001;
  std::int64_t warmup = 0;            // steps from 0 up to the full rate
  std::string decay = "none";         // to 0 at the last step: none, linear, cosine
  std::int64_t eval_every = 0;        // steps; 0: at the end only
  std::int64_t patience = 0;          // evaluations without a better one that end it; 0: all steps
  std::int64_t checkpoint_every = 0;  // steps; 0: when told to stop, and by `keep_model`
  int keep = 2;                       // checkpoints
  std::string keep_model = "best";    // of a finished run: last (the final one), best (that and the
                                      // best by evaluation), none (with `save`: the final one)
  std::string publish;                // a folder that servers watch; empty: none
  double publish_every = 0.5;         // seconds
  std::int64_t seed = 1;
  std::string runs = "runs";  // where run folders are made
  std::string save;           // the run folder itself, a new one
  std::string resume;         // a run folder to go on with
  bool no_events = false;     // no files for TensorBoard
  bool as_json = false;
  bool print_config = false;
  bool wants_help = false;

  Settings() = default;
  Settings(const Settings&) = default;
  Settings& operator=(const Settings&) = default;
  virtual ~Settings();

  /// All settings, bound to this object.
  virtual settings::Table table() = 0;
  /// Throws settings::UsageError or launch::LaunchError for values that do not fit together.
  virtual void check() const;
  /// Whether rank 0 takes this program's standard input.
  virtual bool reads_stdin() const { return false; }
  /// Ranks that see different samples.
  virtual std::int64_t data_ranks() const { return num_ranks; }

 protected:
  // Parts of a table.
  settings::Setting& add_ranks(settings::Table& table);
  void add_device(settings::Table& table);       // --device, --share-gpus, --threads
  void add_schedule(settings::Table& table);     // --warmup, --decay
  void add_checkpoints(settings::Table& table);  // --checkpoint-every, --keep, --keep-model
  void add_publishing(settings::Table& table);   // --publish, --publish-every
  void add_seed(settings::Table& table, const std::string& help);
  void add_output(settings::Table& table);  // --runs, --save, --resume, --json, --config, …
};

/// Reads words into `given`: the run's own configuration first if they resume one. Compares it with
/// what `saved`, another object of the same kind, reads from there. Throws settings::UsageError or
/// launch::LaunchError; says on standard error what the run goes on with, if `tells`.
TESSERA_API void read(Settings& given, Settings& saved, const std::vector<std::string>& words,
                      bool tells = true);

}  // namespace tessera::trainer
