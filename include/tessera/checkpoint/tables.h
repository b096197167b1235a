// tessera/checkpoint/tables.h — embedding tables and the state of their row optimizers in a State.
//
// Every rank names the boxes of tables that it holds. What was saved under one way of cutting loads
// under any other: weights and full optimizer state lie in the box of their weight; row-wise state
// has one number per row and per cut of the columns, see docs/checkpoint.md.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/state.h"
#include "tessera/core/export.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/embedding/table_batch.h"

namespace tessera::checkpoint {

/// A box of a table on this rank.
struct TableShard {
  std::string name;  // of the weight, the same on every rank: "embedding_bags.users.weight"
  std::int64_t table_rows = 0;
  std::int64_t table_columns = 0;
  std::int64_t row = 0;  // where the box begins
  std::int64_t column = 0;
  at::Tensor weight;  // [rows, columns]
  /// The optimizer's, by its name for them ("momentum1"): [rows, columns], or [rows] if row-wise.
  std::map<std::string, at::Tensor> state = {};
  bool is_replicated = false;    // every rank holds the whole table
  at::Tensor touched_rows = {};  // of the box, see Piece
};

/// Where the shards come from; asked at every save and load.
class TESSERA_API TableSource {
 public:
  virtual ~TableSource();
  virtual std::vector<TableShard> shards() = 0;
  /// "<name>.step" and "<name>.lr", equal on all ranks that hold a part of the table.
  virtual Values values() { return {}; }
  virtual void restore(const Values& values);
};

/// Adds the weights as `prefix` and their name (none: somebody else saves them), and the state of
/// their optimizer as `optimizer_prefix`, name and the state's. Throws ValueError, at a save or
/// load, for a shard whose tensors do not have one shape.
TESSERA_API void add_tables(State& state, std::shared_ptr<TableSource> source,
                            const std::optional<std::string>& prefix = "model.",
                            const std::string& optimizer_prefix = "optimizer.");

/// State and rows of one of an optimizer's tables, put into `shard`.
TESSERA_API void add_state(TableShard& shard, const embedding::RowOptimizer& optimizer,
                           const std::string& table);
/// Steps and learning rate as a TableSource names them.
TESSERA_API Values values_of(const embedding::RowOptimizer& optimizer, const std::string& name);
TESSERA_API void restore(embedding::RowOptimizer& optimizer, const std::string& name,
                         const Values& values);

/// The tables of a batch, all of them whole on every rank. A weight is called `group`, the table's
/// name, and ".weight".
TESSERA_API std::shared_ptr<TableSource> whole_tables(embedding::TableBatch batch,
                                                      std::string group);

}  // namespace tessera::checkpoint
