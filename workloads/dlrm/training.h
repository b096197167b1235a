// dlrm/training.h — trains DLRM with tables over ranks: data, plan, steps, evaluation, checkpoints.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dlrm/click_log.h"
#include "dlrm/model.h"
#include "dlrm/synthetic.h"
#include "tessera/comm/group.h"
#include "tessera/core/step_recorder.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/sharding/plan.h"

namespace tessera::workloads::dlrm {

struct TrainingOptions {
  /// Features and num_dense are those of the log.
  DlrmOptions model;
  std::int64_t batch = 2048;  // samples per rank and step
  std::int64_t num_steps = 300;
  /// Step size of dense layers and of tables; the schedule scales both.
  double learning_rate = 0.05;
  double table_learning_rate = 0.05;
  std::string optimizer = "adagrad";  // of dense layers: sgd, adagrad, adam
  embedding::OptimizerKind table_optimizer = embedding::OptimizerKind::kRowWiseAdagrad;
  std::int64_t warmup_steps = 0;  // from 0 up to the full rate
  std::string decay = "none";     // to 0 at the last step: none, linear, cosine
  bool bfloat16 = false;          // dense layers compute in it; parameters stay float32
  std::int64_t eval_every = 0;    // steps; 0: at the end only
  std::int64_t eval_samples = 65536;
  std::int64_t checkpoint_every = 0;  // steps; 0: when told to stop only
  int keep_checkpoints = 2;
  std::string checkpoints;  // folder; none are saved if empty
  bool resume = false;      // from the newest checkpoint there, if there is one
  std::uint64_t seed = 1;
};

/// One table per feature of a log, named as it.
std::vector<embedding::EmbeddingTableConfig> tables_of(const ClickSchema& schema,
                                                       std::int64_t embedding_dim);

/// How the tables lie if nobody says otherwise. `sharding` is "table_wise" (largest first, each to
/// the rank with fewest bytes), "row_wise", "column_wise", "data_parallel", or "auto": as
/// table_wise, but a table larger than a rank's share of all bytes is cut by rows. Throws
/// ValueError for another word, and for tables that cannot be cut so.
sharding::ModulePlan default_plan(const std::vector<embedding::EmbeddingTableConfig>& tables,
                                  const std::string& sharding, const sharding::Topology& topology);

/// Bytes of the weights on each rank.
std::vector<double> bytes_per_rank(const sharding::ModulePlan& plan, int num_ranks);

struct Evaluation {
  std::int64_t step = 0;
  double log_loss = 0;
  double auc = 0;
  double normalised_entropy = 0;
  double calibration = 0;
  std::int64_t samples = 0;
};

struct Progress {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // mean over the samples of all ranks, before the step
  double learning_rate = 0;
  std::int64_t samples = 0;  // of all ranks
  core::StepTotals time;     // of this rank
  double mean_exposed = 0;  // exposed communication in the step before, mean over ranks; 0 at first
  double auc = 0;           // of what was predicted for this rank's samples lately; NaN at first
};

/// Called as training goes on, on every rank.
struct Listener {
  std::function<void(std::int64_t first_step)> started;  // after a checkpoint was loaded
  std::function<void(const Progress&)> stepped;
  std::function<void(const Evaluation&)> evaluated;
};

struct Summary {
  std::int64_t first_step = 0;  // steps that a checkpoint had done already
  std::int64_t last_step = 0;
  bool was_stopped = false;
  bool has_diverged = false;  // the loss, or what was predicted to judge, is not a number
  double loss = 0;            // of the last step
  std::optional<Evaluation> evaluation;
  std::uint64_t fingerprint = 0;  // of all parameters of all ranks; the same on all of them
};

/// Trains on samples of `log` and judges on others: those after 2^40 of a log without end, the last
/// `eval_samples` (at most a tenth) of one with an end, which is read again when it is over.
///
/// Collective. Parameters start from the seed alone, whatever the plan and the number of ranks, and
/// the loss curve differs by rounding only. When `is_told_to_stop` returns true on any rank, all
/// finish the step and save. When the loss is not a number any more, all stop and save nothing.
/// Phases go to `recorder`. Throws ValueError for options that make no
/// sense, DataError for a log that is too short.
Summary train(const TrainingOptions& options, std::shared_ptr<const ClickLog> log,
              const sharding::ModulePlan& plan, const comm::Group& group,
              core::StepRecorder& recorder, const Listener& listener = {},
              const std::function<bool()>& is_told_to_stop = {});

}  // namespace tessera::workloads::dlrm
