// tessera/collision/sharded_managed_collision.h — managed collision over the ranks of a group.
//
// An id travels to the rank that owns it, which counts, admits and evicts, and its row travels
// back; then the mapped features take the road of every sharded table. Rows lie where their ids
// are, so a row that changes hands is reset on the spot.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/collision/managed_collision_tables.h"
#include "tessera/comm/awaitable.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/sharding/sharded_embedding_collection.h"

namespace tessera::collision {

/// What one batch carries from its input dist to its output dist; opaque to others.
struct ManagedCollisionContext;
/// The ids of a batch that this rank owns, once they are here.
struct ManagedCollisionInput {
  std::shared_ptr<ManagedCollisionContext> context;
};
using ManagedCollisionDist = comm::Awaitable<comm::Awaitable<ManagedCollisionInput>>;

/// A ManagedCollisionCollection over ranks. Tables lie row_wise, their ids dealt by bits of their
/// hash, as many as a rank has rows (by ranges of the hashed ids where a module has a hash function
/// and a bound); or table_wise, on one rank. Where columns are cut too, the rank with the first
/// columns of some rows has their ids. Every rank sends a different id once, with how often it
/// came. Unknown ids all have the table's last row.
///
/// Collective: construction, input_dist, compute, forward. What is wrong with one rank's features
/// is the same ValueError on all, raised by the first wait.
class TESSERA_API ShardedManagedCollisionCollection : public torch::nn::Module {
 public:
  /// `modules` are MCHManagedCollisionModules; one that has ids already can lie table_wise only.
  /// Throws ValueError for a plan that does not fit.
  ShardedManagedCollisionCollection(const ManagedCollisionModules& modules,
                                    std::vector<embedding::EmbeddingTableConfig> tables,
                                    const sharding::ModulePlan& plan, comm::Group group);
  ~ShardedManagedCollisionCollection() override;

  /// Starts sending ids. May run ahead of earlier batches' `compute`.
  ManagedCollisionDist input_dist(const jagged::KeyedJaggedTensor& features);
  /// Counts, admits, evicts and finds rows, in training; starts sending them home. In the order of
  /// the batches.
  comm::LazyAwaitable<jagged::KeyedJaggedTensor> compute_and_output_dist(
      const ManagedCollisionInput& input);
  jagged::KeyedJaggedTensor forward(const jagged::KeyedJaggedTensor& features);

  const std::vector<embedding::EmbeddingTableConfig>& embedding_configs() const noexcept;
  std::vector<embedding::EmbeddingTableConfig> mapped_configs() const;
  /// The rows that got another id, to be reset, by table: those whose ids this rank owns, or, where
  /// a table's columns are cut, all of them; then it is collective.
  std::map<std::string, std::optional<at::Tensor>> evict();
  /// This rank's part of a table's ids; null if it has none.
  std::shared_ptr<MCHManagedCollisionModule> part(const std::string& table) const;
  /// Where the rows of each part of a table begin, and how many rows there are.
  const std::vector<std::int64_t>& bounds(const std::string& table) const;
  /// The rank that owns each of a table's ids, as `profile` sees them.
  at::Tensor owners(const std::string& table, const at::Tensor& ids) const;
  const comm::Group& group() const noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// A ManagedCollisionEmbeddingBagCollection over ranks.
class TESSERA_API ShardedManagedCollisionEmbeddingBagCollection : public torch::nn::Module {
 public:
  ShardedManagedCollisionEmbeddingBagCollection(std::vector<embedding::EmbeddingBagConfig> tables,
                                                const ManagedCollisionModules& modules,
                                                const sharding::ModulePlan& plan,
                                                const comm::Group& group,
                                                bool return_remapped_features = false,
                                                bool is_weighted = false,
                                                const sharding::ShardedOptions& options = {});

  ManagedCollisionDist input_dist(const jagged::KeyedJaggedTensor& features) {
    return ids_->input_dist(features);
  }
  std::pair<comm::LazyAwaitable<jagged::KeyedTensor>, RemappedFeatures> compute_and_output_dist(
      const ManagedCollisionInput& input);
  std::pair<jagged::KeyedTensor, RemappedFeatures> forward(
      const jagged::KeyedJaggedTensor& features);

  const std::shared_ptr<ShardedManagedCollisionCollection>& ids() const noexcept { return ids_; }
  const std::shared_ptr<sharding::ShardedEmbeddingBagCollection>& tables() const noexcept {
    return tables_;
  }

 private:
  std::shared_ptr<ShardedManagedCollisionCollection> ids_;
  std::shared_ptr<sharding::ShardedEmbeddingBagCollection> tables_;
  bool returns_remapped_;
};

/// A ManagedCollisionEmbeddingCollection over ranks.
class TESSERA_API ShardedManagedCollisionEmbeddingCollection : public torch::nn::Module {
 public:
  ShardedManagedCollisionEmbeddingCollection(std::vector<embedding::EmbeddingConfig> tables,
                                             const ManagedCollisionModules& modules,
                                             const sharding::ModulePlan& plan,
                                             const comm::Group& group,
                                             bool return_remapped_features = false,
                                             const sharding::ShardedSequenceOptions& options = {});

  ManagedCollisionDist input_dist(const jagged::KeyedJaggedTensor& features) {
    return ids_->input_dist(features);
  }
  std::pair<comm::LazyAwaitable<embedding::NamedRows>, RemappedFeatures> compute_and_output_dist(
      const ManagedCollisionInput& input);
  std::pair<embedding::NamedRows, RemappedFeatures> forward(
      const jagged::KeyedJaggedTensor& features);

  const std::shared_ptr<ShardedManagedCollisionCollection>& ids() const noexcept { return ids_; }
  const std::shared_ptr<sharding::ShardedEmbeddingCollection>& tables() const noexcept {
    return tables_;
  }

 private:
  std::shared_ptr<ShardedManagedCollisionCollection> ids_;
  std::shared_ptr<sharding::ShardedEmbeddingCollection> tables_;
  bool returns_remapped_;
};

}  // namespace tessera::collision
