// src/sharding/tables_state.h — what every sharded collection keeps: layout, rows, what sends ids.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sharding/input_dist.h"
#include "sharding/local_tables.h"
#include "sharding/table_layout.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::sharding {

struct TablesState {
  TablesState(const char* operation, std::vector<embedding::EmbeddingTableConfig> tables,
              ModulePlan plan, const comm::Group& group, const ShardedOptions& options,
              bool is_pooled);
  /// For tables that make their rows themselves.
  TablesState(const comm::Group& group, std::shared_ptr<const TableLayout> layout);
  virtual ~TablesState() = default;
  TablesState(const TablesState&) = delete;
  TablesState& operator=(const TablesState&) = delete;

  /// Makes the rows and what sends ids to them; `words` must be the same on all ranks. Collective.
  void make_tables(const ShardedOptions& options, InputDistOptions input,
                   const std::string& words = {});
  /// Rows are about to change: reads what is still to be read of them.
  virtual void read_unread() {}

  // What ShardedTables answers; `local` does it, unless rows are kept otherwise.
  virtual std::vector<LocalShard> shards() const { return local->shards(); }
  virtual std::vector<std::shared_ptr<embedding::RowOptimizer>> optimizers() const {
    return local->optimizers();
  }
  virtual void set_learning_rate(double learning_rate) { local->set_learning_rate(learning_rate); }
  /// The rows on this rank. Throws ValueError where a call is not for tables like these.
  LocalTables& fixed_rows(const char* call) const;

  comm::Group group;
  std::shared_ptr<const TableLayout> layout;
  std::unique_ptr<LocalTables> local;
  std::shared_ptr<const InputSender> sender;
};

}  // namespace tessera::sharding
