// dlrm/training_tables.h — tables of a training: where they lie, what they start with, what is
// published of them, and what is told of the plan.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dlrm/click_log.h"
#include "dlrm/from_settings.h"
#include "dlrm/settings.h"
#include "dlrm/table_problem.h"
#include "tessera/checkpoint/tables.h"
#include "tessera/comm/group.h"
#include "tessera/embedding/config.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::workloads::dlrm {

/// How the tables lie, and on rank 0 what the planner thinks of it.
struct LaidTables {
  sharding::ModulePlan plan;
  PlanFigures figures;
  KnownSpeeds known;
};

/// The planner's plan of rank 0, for all, or what the settings say. Collective. Throws ValueError
/// on all ranks where there is no plan, or one that cannot be trained with.
LaidTables lay_tables(const std::string& verb, const Settings& settings, const ClickSchema& schema,
                      const std::vector<embedding::EmbeddingTableConfig>& tables,
                      const comm::Group& world);

sharding::ShardedOptions table_options(const Settings& settings);

/// The same numbers for the same seed, wherever the rows lie.
void fill_tables(const sharding::ShardedEmbeddingBagCollection& tables, std::uint64_t seed);

/// Rows of the tables without what steps them, and which of them were stepped from now on.
std::shared_ptr<checkpoint::TableSource> published_tables(
    std::shared_ptr<sharding::ShardedEmbeddingBagCollection> tables);

/// What a step computes beside the tables: products of layers, and of every pair of features.
planner::DenseLoad dense_load(const Settings& settings, const std::vector<at::Tensor>& parameters,
                              std::size_t num_tables);

// For people.
std::string plan_lines(const LaidTables& laid);
/// Where the largest tables lie; the others are counted.
std::string largest_tables(const std::vector<embedding::EmbeddingTableConfig>& tables,
                           const sharding::ModulePlan& plan);
std::string prediction_line(const planner::StepTime& predicted, std::vector<double> step_seconds);

// Lines of a run's metrics.
std::string plan_record(const Settings& settings, const LaidTables& laid,
                        const std::optional<planner::StepTime>& predicted);
/// `lookups` is the number of rows that all ranks ask for in a step, spread evenly over the table;
/// a copy of a whole table answers its own rank.
std::string table_record(const embedding::EmbeddingTableConfig& table,
                         const sharding::ParameterSharding& sharding, double lookups);

}  // namespace tessera::workloads::dlrm
