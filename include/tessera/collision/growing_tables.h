// tessera/collision/growing_tables.h — tables without a number of rows, over the ranks of a group.
//
// Every id gets a row of its own when it is first seen, and the tables grow. An id belongs to one
// of 1024 buckets by its hash, for ever; ranks own runs of buckets, and a row lies where its id
// does: ids travel to their owner, rows travel back, nothing else. Admission, eviction and first
// values depend on the ids, their order in the batch of all ranks, and the number of the call; so
// tables, ids and counts have the same bits for any number of ranks, if the ranks' batches together
// are the same and their gradients are.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/collision/id_table.h"
#include "tessera/comm/codec.h"
#include "tessera/core/export.h"
#include "tessera/embedding/collection_lookup.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/jagged/keyed_tensor.h"
#include "tessera/sharding/plan.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::collision {

/// What an id without a row reads: one that was not admitted, or is unknown in evaluation.
enum class UnknownIds : std::uint8_t {
  kRow,   // one row per table, the same on all ranks, that trains; zero at first
  kZero,  // zeros
  kInit,  // what its row would begin with
};

struct GrowingTable {
  /// `num_embeddings` is not read, and there may be no `init_fn`: rows begin with uniform numbers
  /// within the bounds, by default ±sqrt(1 / embedding_dim), from `seed` and the id (row_init.h).
  embedding::EmbeddingTableConfig config;
  /// Capacity, admission, eviction. Name and buckets are filled in.
  IdTableOptions ids = {};
  UnknownIds unknown = UnknownIds::kRow;
  /// Tables with one seed begin with the same rows for the same ids.
  std::uint64_t seed = 0;
  /// How texts became ids before they came here, if they did: checkpoints keep it, and those of
  /// another hash are refused.
  std::string text_hash = {};
};

struct GrowingOptions {
  embedding::OptimizerOptions optimizer = {};
  /// What rows become on the wire, forward and backward.
  comm::Codecs codecs = {};
  int local_size = 0;  // ranks per host; 0: as many as the environment says
};

/// How a table has grown; on this rank, since the start of the process where not said otherwise.
struct Growth {
  std::string table;
  std::int64_t ids = 0;  // that have a row, now
  std::int64_t admitted = 0;
  std::int64_t refused = 0;  // different ids per call that found no room
  std::int64_t evicted = 0;
  std::int64_t sightings = 0;  // ids of training calls
  std::int64_t hits = 0;       // of them, had a row before the call
  std::int64_t bytes = 0;      // of ids and rows, with the optimizer's state
};

/// Rows of a table and all that goes on with them.
struct GrowingRows {
  IdList ids;  // `rows` is not read by a load
  IdSketch sketch;
  at::Tensor weight;                        // [ids, columns]
  std::map<std::string, at::Tensor> state;  // of the optimizer, "momentum1" and "momentum2"
};

/// How often rows were stepped: those of ids, and those of ids without one.
struct GrowingSteps {
  std::int64_t rows = 0;
  std::int64_t unknown = 0;
};

struct GrowingState;

/// What changed in growing tables since a base, for one who saves deltas. Several may follow the
/// same tables, each with a base of its own: a publisher and checkpoints, say. Ids that went are
/// remembered until `forget`, or as long as it lives.
class TESSERA_API GrowingChanges {
 public:
  /// Begins anew: what is taken now is the base of the next delta. A load of a checkpoint does this
  /// to all who follow.
  void forget();
  /// Ids of this rank's part that are new or have other rows than the base, in order of bucket:
  /// those seen by a training call since, or by the last one before, whose backward may have come
  /// later. `rows` are those of GrowingTables::weights_of.
  IdList changed_ids(const std::string& table) const;
  /// Ids that lost their row since the base; some may have another one by now. This rank's.
  const std::vector<std::int64_t>& removed_ids(const std::string& table) const;
  /// The same, and forgets them: for those who keep copies and want removals alone.
  std::vector<std::int64_t> take_removed_ids(const std::string& table);

 private:
  friend class GrowingTables;
  friend struct GrowingState;
  explicit GrowingChanges(std::shared_ptr<GrowingState> state);

  std::shared_ptr<GrowingState> state_;
  std::int64_t base_calls_ = 0;
  std::map<std::string, std::vector<std::int64_t>> removed_;  // by table
};

/// What both kinds of growing collections are. Tables lie row_wise() (ids over all ranks) or
/// table_wise(rank); row_wise() where nothing is said.
///
/// In training (is_training(), and a record for backward is made) a call counts, admits and evicts,
/// in compute_and_output_dist: call it in order of the batches, and backward before the next.
/// Otherwise ids are found and nothing changes. What a rank cannot admit (IdTableFull, no memory)
/// is the same ValueError on all ranks, and no table has changed.
class TESSERA_API GrowingTables : public torch::nn::Module, public sharding::ShardedTables {
 public:
  ~GrowingTables() override;

  const std::vector<GrowingTable>& growing_tables() const noexcept;
  /// Of this rank's parts, in order of the tables; tables that have no part here are left out.
  std::vector<Growth> growth() const;
  /// The same over all ranks, every table. Collective.
  std::vector<Growth> total_growth() const;
  /// Training calls so far: the last step of ids seen in the last one.
  std::int64_t num_calls() const noexcept;

  /// Ids of this rank's part of a table: in order of bucket, then as they came. Empty if it has no
  /// part. `rows` are those of `weights_of`.
  IdList export_ids(const std::string& table) const;
  /// This rank's rows, by the numbers of `export_ids`. Do not keep it over a training call.
  at::Tensor weights_of(const std::string& table) const;
  /// The row of all ids without one, [embedding_dim]. Undefined unless UnknownIds::kRow.
  at::Tensor unknown_row(const std::string& table) const;
  /// Follows what changes from now on; as often as there are some who want to know.
  std::shared_ptr<GrowingChanges> track_changes();

  // ---- State, for those who save by themselves; checkpoint/growing_tables.h does all of it
  /// This rank's rows, in order of bucket.
  GrowingRows export_rows(const std::string& table) const;
  /// Replaces this rank's rows by those of its buckets among the rows given. Throws ValueError for
  /// lists that no table has written, and changes nothing.
  void load_rows(const std::string& table, const GrowingRows& rows);
  /// The same of several tables, in two steps, so that all ranks load or none does: checks all and
  /// gets the memory for all of them; throws, and no table has changed; ...
  void prepare_rows(const std::map<std::string, GrowingRows>& tables);
  /// ... then puts what was prepared in its place, or gives it up. Before any other call.
  void take_prepared_rows();
  void forget_prepared_rows() noexcept;
  /// State of the optimizer of `unknown_row`, itself.
  std::map<std::string, at::Tensor> unknown_state(const std::string& table) const;
  GrowingSteps num_steps() const;
  /// Goes on after so many calls and steps. What is here is the base of all who follow changes.
  void set_progress(std::int64_t num_calls, const GrowingSteps& steps);

  const std::shared_ptr<GrowingState>& growing_state() const noexcept { return state_; }

 protected:
  GrowingTables(const char* name, std::vector<GrowingTable> tables,
                const std::map<std::string, sharding::Placement>& wishes, const comm::Group& group,
                const GrowingOptions& options, bool is_pooled);

  std::shared_ptr<GrowingState> state_;
};

/// Pooled rows of growing tables. Unlike those of fixed tables, bags are summed in order of their
/// ids, by the owner of all of them or at home, so that their sums do not depend on the number of
/// ranks. Collective: construction, forward, backward.
class TESSERA_API GrowingEmbeddingBagCollection : public GrowingTables {
 public:
  /// Throws ValueError for tables or placements that cannot be, and if the ranks' differ.
  GrowingEmbeddingBagCollection(std::vector<GrowingTable> tables, const comm::Group& group,
                                const GrowingOptions& options = {},
                                const std::map<std::string, sharding::Placement>& wishes = {});

  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);
  comm::LazyAwaitable<jagged::KeyedTensor> compute_and_output_dist(
      const sharding::DistributedInput& input);
};

/// Rows of single ids of growing tables, by name.
class TESSERA_API GrowingEmbeddingCollection : public GrowingTables {
 public:
  GrowingEmbeddingCollection(std::vector<GrowingTable> tables, const comm::Group& group,
                             const GrowingOptions& options = {},
                             const std::map<std::string, sharding::Placement>& wishes = {});

  embedding::NamedRows forward(const jagged::KeyedJaggedTensor& features);
  comm::LazyAwaitable<embedding::NamedRows> compute_and_output_dist(
      const sharding::DistributedInput& input);
};

}  // namespace tessera::collision
