// tessera/sharding/sharded_module.h — tables over ranks, in steps that a pipeline can take apart.
//
// A forward pass is: input_dist (ids to the ranks that own their rows; waited twice, once for the
// sizes and once for the ids), compute (rows are read), output_dist (rows to the ranks that own the
// samples; waited once). `forward` takes all of them one after the other. A pipeline starts the
// input_dist of a later batch before it computes an earlier one.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/sharding/plan.h"

namespace tessera::sharding {

/// What a batch leaves behind between the steps: sizes, orders, ids. Made by input_dist, belongs to
/// one batch, opaque to others.
struct DistContext;
/// What a module keeps of its tables; opaque to others.
struct TablesState;

/// The ids this rank will look up, once they are here.
struct DistributedInput {
  std::shared_ptr<DistContext> context;
};
/// First wait: the sizes are known and the ids are on their way. Second: they are here.
using InputDist = comm::Awaitable<comm::Awaitable<DistributedInput>>;

/// A part of a table on this rank, as checkpoints and optimizers see it.
struct LocalShard {
  std::string table;
  /// The table's name; "<table>#1", "<table>#2" … for its second, third shard on this rank.
  std::string name;
  Shard place;
  std::int64_t table_rows = 0;
  std::int64_t table_columns = 0;
  at::Tensor weight;  // [place.rows, place.columns]
  /// What the optimizer keeps beside it, "momentum1" and "momentum2" as far as it has them:
  /// [place.rows, place.columns] or [place.rows]. The tensors are the state itself.
  std::map<std::string, at::Tensor> state;
};

/// What pipelines and DistributedModelParallel need of a sharded collection, pooled or not.
class TESSERA_API ShardedTables {
 public:
  virtual ~ShardedTables();

  /// Starts sending the ids. Collective over the group: all ranks call it, in the same order. Bad
  /// features (missing keys, ids outside their table, other keys than on other ranks) are the same
  /// exception on all ranks, raised by the first wait, and name rank and feature.
  InputDist input_dist(const jagged::KeyedJaggedTensor& features);

  const comm::Group& group() const noexcept;
  const ModulePlan& plan() const noexcept;
  /// The parts of tables on this rank, in order of the configs; data-parallel tables whole. Rows in
  /// caches are written back first.
  std::vector<LocalShard> local_shards() const;
  /// Rows in caches of GPUs (ShardedOptions::host_rows) go home: before the weights or the state of
  /// their optimizer are read or written. Throws ValueError between a forward and its backward.
  void write_back() const;
  /// Starts bringing the rows of a batch whose ids are here into the caches, on the current stream.
  void prefetch(const DistributedInput& input) const;
  /// Of this rank's tables with a cache.
  std::vector<embedding::RowCacheStatistics> cache_statistics() const;

  /// What steps the rows of this rank's shards, and of the data-parallel tables, as far as there
  /// are any. Tables are called as in LocalShard::name.
  std::vector<std::shared_ptr<embedding::RowOptimizer>> optimizers() const;
  /// Fills this rank's parts from whole tables (name → [rows, columns]), each rank for itself.
  void load_tables(const std::map<std::string, at::Tensor>& tables);
  /// Whole tables, on every rank. Collective; for tests and small models.
  std::map<std::string, at::Tensor> gather_tables() const;
  /// With GradientForm::kSparse: one step from the gradients of all passes since the last.
  void step();
  void zero_grad_rows();
  /// The norm over all gradients of all ranks' shards; scales them to `max_norm` if it is greater.
  /// Collective. Data-parallel tables count once.
  double clip_grad_norm(double max_norm);
  void set_learning_rate(double learning_rate);
  /// Whether backward passes of this rank keep the gradients of data-parallel tables, from now on;
  /// the first pass that does not exchanges what has gathered. The same on all ranks. Returns what
  /// was. Throws ValueError unless gradients are kSparse.
  bool keep_local_gradients(bool is_kept);

  const std::shared_ptr<TablesState>& tables_state() const noexcept { return tables_state_; }

 protected:
  /// Set by the constructor of a module.
  std::shared_ptr<TablesState> tables_state_;
};

/// Starts the input_dist of several modules with one message for all their sizes. All modules are
/// of one group; the same modules in the same order on every rank.
TESSERA_API std::vector<InputDist> fused_input_dist(
    const std::vector<std::pair<ShardedTables*, jagged::KeyedJaggedTensor>>& inputs);

}  // namespace tessera::sharding
