// dlrm/training.h — DLRM with tables over ranks, as the trainer wants it, and where the tables lie.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "dlrm/click_log.h"
#include "tessera/comm/group.h"
#include "tessera/embedding/config.h"
#include "tessera/sharding/plan.h"

namespace tessera::trainer {
class AnyWorkload;
}  // namespace tessera::trainer

namespace tessera::workloads::dlrm {

struct Settings;

/// One table per feature of a log, named as it.
std::vector<embedding::EmbeddingTableConfig> tables_of(const ClickSchema& schema,
                                                       std::int64_t embedding_dim);

/// How the tables lie by a rule. `sharding` is "table_wise" (largest first, each to the rank with
/// fewest bytes), "row_wise", "column_wise", "data_parallel", or "balanced": as table_wise, but a
/// table larger than a rank's share of all bytes is cut by rows. Throws ValueError for another
/// word, and for tables that cannot be cut so.
sharding::ModulePlan default_plan(const std::vector<embedding::EmbeddingTableConfig>& tables,
                                  const std::string& sharding, const sharding::Topology& topology);

/// Bytes of the weights on each rank.
std::vector<double> bytes_per_rank(const sharding::ModulePlan& plan, int num_ranks);

/// Trains on samples of the log that the settings name and judges on others: those after 2^40 of a
/// log without end, the last `eval_samples` (at most a tenth) of one with an end, which is read
/// again when it is over.
///
/// Collective. Parameters start from the seed alone, whatever the plan and the number of ranks, and
/// the loss curve differs by rounding only. Throws ValueError for settings that make no sense,
/// DataError for a log that is too short. `settings` must outlive it.
std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world);

/// Where a run keeps the schema of its log, if that has one.
inline constexpr const char* kSchemaFile = "schema.toml";

struct Judged {
  std::vector<std::pair<std::string, double>> figures;  // as evaluation has them
  std::int64_t step = 0;                                // of the checkpoint
  std::string checkpoint;                               // its folder
  std::vector<float> scores;  // logits in the order of the log, on every rank
};

/// Judges the model of a run: the checkpoint of `step` (-1: the newest) in the folder
/// `checkpoints`, on all samples of the log `data`, or without one on those that the run was judged
/// on. Collective. Throws DataError for a log of another schema than `schema`, if both have one,
/// ValueError for settings that make no sense, checkpoint::Error for a checkpoint that cannot be
/// used, among them one whose tables or layers are others than the log's.
Judged judge(const Settings& settings, const std::string& data, const std::string& checkpoints,
             std::int64_t step, const std::string& schema, const comm::Group& world);

}  // namespace tessera::workloads::dlrm
