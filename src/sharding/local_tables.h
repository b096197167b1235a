// src/sharding/local_tables.h — the parts of tables on this rank: rows, gradients, steps.

#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sharding/row_norms.h"
#include "sharding/table_layout.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::sharding {

struct LocalTablesOptions {
  embedding::OptimizerOptions optimizer = {};
  embedding::GradientForm gradients = embedding::GradientForm::kFused;
  bool exact_row_norms = false;
  at::Device device = at::kCPU;
  std::map<std::string, double> host_rows = {};
  embedding::CachePolicy cache_policy = embedding::CachePolicy::kLru;
};

/// Makes the weights of this rank's shards and looks them up. Construction is collective:
/// data-parallel tables start as on rank 0.
class LocalTables {
 public:
  LocalTables(std::shared_ptr<const TableLayout> layout, const comm::Group& group,
              const LocalTablesOptions& options);
  LocalTables(const LocalTables&) = delete;
  LocalTables& operator=(const LocalTables&) = delete;

  /// The shards on this rank; the weights ask for gradients. State is filled in anew.
  std::vector<LocalShard> shards() const;
  /// The weights themselves, in the order of `shards`.
  const std::vector<LocalShard>& weights() const noexcept { return shards_; }

  /// Cached rows go home, and the caches are empty: before others read or write the weights or
  /// their state.
  void write_back() const;

  /// Looks up every route of every rank; null if this rank has no rows.
  const embedding::TableBatch* routed() const noexcept { return routed_.get(); }
  /// Look up the routes that stay here: tables whose rows are stepped together, and tables with
  /// dense gradients. Null if there are none.
  const embedding::TableBatch* local_stepped() const noexcept { return local_stepped_.get(); }
  const embedding::TableBatch* local_dense() const noexcept { return local_dense_.get(); }
  /// Which of the layout's local routes each of them takes, in order.
  const std::vector<std::size_t>& stepped_routes() const noexcept { return stepped_routes_; }
  const std::vector<std::size_t>& dense_routes() const noexcept { return dense_routes_; }

  std::vector<std::shared_ptr<embedding::RowOptimizer>> optimizers() const;
  void step();
  void zero_grad();
  /// Whether gradients of tables that stay here are kept for a later exchange. Returns what it was.
  bool keep_local_gradients(bool is_kept);
  double clip_grad_norm(double max_norm);
  void set_learning_rate(double learning_rate);

 private:
  /// Tables whose gradients come through a sink.
  struct Receiver {
    std::vector<std::size_t> shards;    // numbers among shards_, one per table
    std::vector<bool> is_dense;         // its gradient becomes a dense one
    std::vector<std::int64_t> columns;  // of the whole rows of those that are not dense
    std::shared_ptr<embedding::RowOptimizer> optimizer;  // of those that are not dense
  };

  void make_shards();
  void make_row_norms();
  void make_routed();
  void make_local();
  bool is_exact() const;
  void check_exchanged() const;
  /// Its number among all shards of its table.
  std::size_t number_of(std::size_t shard) const;
  embedding::Table table_of(std::size_t shard) const;
  void check_host_rows() const;
  /// Whether its rows lie in host memory while the device is a GPU.
  bool is_on_host(std::size_t table) const;
  std::vector<embedding::RowGradient> kept_gradients(const Receiver& receiver) const;
  std::shared_ptr<embedding::RowOptimizer> make_optimizer(const Receiver& receiver) const;
  void take(const Receiver& receiver, std::vector<embedding::RowGradient> gradients);
  void take_local(std::vector<embedding::RowGradient> gradients);
  void step_rows(const Receiver& receiver, const std::vector<embedding::RowGradient>& gradients);
  std::vector<embedding::RowGradient> averaged(std::vector<embedding::RowGradient> gradients) const;

  std::shared_ptr<const TableLayout> layout_;
  comm::Group group_;
  LocalTablesOptions options_;
  std::vector<LocalShard> shards_;
  std::vector<std::size_t> table_of_shard_;
  std::unique_ptr<RowNorms> row_norms_;  // if norms are taken over cut rows
  Receiver routed_receiver_;
  Receiver local_receiver_;
  bool keeps_local_ = false;
  std::vector<at::Tensor> kept_;  // sparse, one per table that stays here, or none
  std::unique_ptr<embedding::TableBatch> routed_;
  std::unique_ptr<embedding::TableBatch> local_stepped_;
  std::unique_ptr<embedding::TableBatch> local_dense_;
  std::vector<std::size_t> stepped_routes_;
  std::vector<std::size_t> dense_routes_;
};

/// Fills shards from whole tables by name. Throws ValueError for a table that is missing or of
/// another shape, before it changes anything.
void load_shards(const TableLayout& layout, const std::vector<LocalShard>& shards,
                 const std::map<std::string, at::Tensor>& tables);
/// Whole tables on every rank, on the CPU. Collective.
std::map<std::string, at::Tensor> gather_shards(const TableLayout& layout,
                                                const std::vector<LocalShard>& shards,
                                                const comm::Group& group);

}  // namespace tessera::sharding
