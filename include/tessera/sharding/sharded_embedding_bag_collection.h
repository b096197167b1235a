// tessera/sharding/sharded_embedding_bag_collection.h — pooled lookups of tables cut over ranks.

#pragma once

#include <map>
#include <memory>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/codec.h"
#include "tessera/embedding/config.h"
#include "tessera/embedding/feature_processor.h"
#include "tessera/embedding/optimizer.h"
#include "tessera/embedding/table_batch.h"
#include "tessera/jagged/keyed_tensor.h"
#include "tessera/sharding/sharded_module.h"

namespace tessera::sharding {

struct ShardedOptions {
  /// How the rows of kFused tables are stepped in backward.
  embedding::OptimizerOptions optimizer = {};
  /// kFused: backward steps the rows. kSparse: backward leaves row-sparse gradients, which
  /// `accumulate` over several passes; step() steps. Tables whose plan says kDense are kDense.
  embedding::GradientForm gradients = embedding::GradientForm::kFused;
  embedding::BoundsCheckMode bounds_check = embedding::BoundsCheckMode::kFatal;
  /// What rows become on the wire, forward and backward.
  comm::Codecs codecs = {};
  /// Ranks per host, for the types that know hosts; 0: as many as the environment says.
  int local_size = 0;
  /// Rules that read the norm of a row (row-wise Adagrad, partial row-wise Adam, LAMB and its
  /// partial form, LARS) take it over all columns of a column-cut table, as if it were not cut.
  /// Otherwise each part goes by its own columns. Costs one or two small exchanges per step among
  /// the ranks that hold such parts.
  bool exact_row_norms = false;
  /// Weighted pooled collections: weights are given to compute_and_output_dist and travel then, not
  /// with the ids. For weights that come of parameters, which earlier batches still change.
  bool weights_come_later = false;
  /// Batches with longer bags are refused, alike on all ranks. Features not named may be any.
  embedding::LongestBags longest_bags = {};
  /// Tables on GPUs whose rows lie in host memory, mapped into the GPU's: name to the share of a
  /// rank's rows that a cache in GPU memory has room for; 0: no cache. See docs/gpu.md. On the CPU
  /// it changes nothing.
  std::map<std::string, double> host_rows = {};
  embedding::CachePolicy cache_policy = embedding::CachePolicy::kLru;
  at::Device device = at::kCPU;
};

/// An EmbeddingBagCollection whose tables lie over the ranks of a group as a plan says. Every rank
/// puts in its own batch and gets the pooled rows of its own samples. Gradients equal those of one
/// process with all batches, averaged over the ranks (see set_gradient_division).
///
/// Collective over the group: construction, forward, backward, state transfer. Batches may have
/// different sizes, or none, on every rank. Keys of the result: see docs/sharding.md; use names,
/// not places.
///
/// Parameters are this rank's shards, `embedding_bags.<table>.weight`, and `weight_1`, `weight_2` …
/// for further shards of a table on this rank.
class TESSERA_API ShardedEmbeddingBagCollection : public torch::nn::Module, public ShardedTables {
 public:
  /// Rows start as the configs say; the same numbers as without sharding if the tables' init does
  /// not depend on the shard (see `load_tables`). Throws ValueError for a plan that does not fit,
  /// and if the ranks' plans differ, naming the table.
  ShardedEmbeddingBagCollection(std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan,
                                const comm::Group& group, bool is_weighted = false,
                                const ShardedOptions& options = {});
  ~ShardedEmbeddingBagCollection() override;

  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);

  /// Reads the rows and starts sending them home.
  comm::LazyAwaitable<jagged::KeyedTensor> compute_and_output_dist(const DistributedInput& input);
  /// The same with `weights_come_later`: first sends one weight for each id of the features, in
  /// their order. Without `weights`, those that the features have.
  comm::LazyAwaitable<jagged::KeyedTensor> compute_and_output_dist(const DistributedInput& input,
                                                                   const at::Tensor& weights);

  const std::vector<embedding::EmbeddingBagConfig>& embedding_bag_configs() const noexcept;

  struct State;
  /// While it lives, backward passes of this rank keep the gradients of data-parallel tables; the
  /// first pass after it exchanges what has gathered. Live on all ranks in the same passes.
  class TESSERA_API NoSync {
   public:
    explicit NoSync(std::shared_ptr<State> state);
    ~NoSync();
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    std::shared_ptr<State> state_;
    bool was_kept_;
  };
  /// For accumulating over passes. Throws ValueError unless gradients are kSparse.
  [[nodiscard]] NoSync no_sync() { return NoSync(state_); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace tessera::sharding
