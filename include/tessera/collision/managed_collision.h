// tessera/collision/managed_collision.h — any ids onto the rows of tables of a fixed size.
//
// The reference's modules on one rank. A module keeps the ids of one table; a collection has one
// for each table, by name. State has the reference's names and layout, so that state dicts go both
// ways (docs/collision.md). Over ranks: sharded_managed_collision.h. Tables that grow with their
// ids: growing_tables.h.

#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/collision/mch.h"
#include "tessera/core/export.h"
#include "tessera/embedding/config.h"
#include "tessera/jagged/keyed_jagged_tensor.h"

namespace tessera::collision {

// ---- Policies: which ids keep their rows

/// Of the counts of different ids: which of them may come, as a mask, and the threshold.
using ThresholdFilter = std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& counts)>;

/// More often than a multiple of the mean.
TESSERA_API std::pair<at::Tensor, at::Tensor> dynamic_threshold_filter(
    const at::Tensor& counts, double threshold_skew_multiplier = 10.0);
/// More often than the mean.
TESSERA_API std::pair<at::Tensor, at::Tensor> average_threshold_filter(const at::Tensor& counts);
/// A draw in which each sighting of an id counts with a probability; the threshold is what was
/// drawn, by torch's generator.
TESSERA_API std::pair<at::Tensor, at::Tensor> probabilistic_threshold_filter(
    const at::Tensor& counts, double per_id_probability = 0.01);

/// What a policy knows of ids, one number each: int64, undefined if it does not keep them.
struct MchMetadata {
  at::Tensor counts;
  at::Tensor last_access_iter;
};

/// Scores ids; the best ones have slots. Derive from it for a rule of one's own.
class TESSERA_API MCHEvictionPolicy {
 public:
  explicit MCHEvictionPolicy(ThresholdFilter filter = nullptr) : filter_(std::move(filter)) {}
  virtual ~MCHEvictionPolicy();

  virtual bool keeps_counts() const = 0;
  virtual bool keeps_iterations() const = 0;
  /// A score for each id, floating or whole numbers: the greatest stay. `iteration` is now.
  virtual at::Tensor scores(std::int64_t iteration, const MchMetadata& metadata) const = 0;
  /// Sees the counts of ids that wait, before they are scored; may be empty.
  const ThresholdFilter& filter() const noexcept { return filter_; }

 private:
  ThresholdFilter filter_;
};

/// Keeps the ids that came most often.
class TESSERA_API LfuEvictionPolicy final : public MCHEvictionPolicy {
 public:
  using MCHEvictionPolicy::MCHEvictionPolicy;
  bool keeps_counts() const override { return true; }
  bool keeps_iterations() const override { return false; }
  at::Tensor scores(std::int64_t iteration, const MchMetadata& metadata) const override;
};

/// Keeps the ids that came last: -(t - last + 1)^decay_exponent.
class TESSERA_API LruEvictionPolicy final : public MCHEvictionPolicy {
 public:
  explicit LruEvictionPolicy(double decay_exponent = 1.0, ThresholdFilter filter = nullptr)
      : MCHEvictionPolicy(std::move(filter)), decay_exponent_(decay_exponent) {}
  bool keeps_counts() const override { return false; }
  bool keeps_iterations() const override { return true; }
  at::Tensor scores(std::int64_t iteration, const MchMetadata& metadata) const override;

 private:
  double decay_exponent_;
};

/// Keeps those with the most sightings: count / (t - last + 1)^decay_exponent.
class TESSERA_API DistanceLfuEvictionPolicy final : public MCHEvictionPolicy {
 public:
  explicit DistanceLfuEvictionPolicy(double decay_exponent = 1.0, ThresholdFilter filter = nullptr)
      : MCHEvictionPolicy(std::move(filter)), decay_exponent_(decay_exponent) {}
  bool keeps_counts() const override { return true; }
  bool keeps_iterations() const override { return true; }
  at::Tensor scores(std::int64_t iteration, const MchMetadata& metadata) const override;

 private:
  double decay_exponent_;
};

// ---- Modules: the ids of one table

/// Maps ids to rows of one table. A base class.
class TESSERA_API ManagedCollisionModule : public torch::nn::Module {
 public:
  /// The rows of the ids; in training, what was seen is learned first.
  at::Tensor forward(const at::Tensor& ids);

  /// The ids as `profile` and `remap` want them. Throws ValueError for ids that cannot be.
  virtual at::Tensor preprocess(const at::Tensor& ids) const = 0;
  /// Learns from ids, in training; `counts` says how often each was seen, undefined: once.
  virtual void profile(const at::Tensor& ids, const at::Tensor& counts) = 0;
  virtual at::Tensor remap(const at::Tensor& ids) = 0;
  /// The rows that got another id since the last call, to be reset; nothing if nobody looked.
  virtual std::optional<at::Tensor> evict() = 0;
  virtual std::int64_t output_size() const = 0;
  virtual std::int64_t input_size() const = 0;
  virtual std::int64_t buckets() const = 0;
  /// How many ids can still come without one going.
  virtual std::int64_t open_slots() const = 0;
  /// Checks, and brings into order, what was loaded into the buffers.
  virtual void validate_state() = 0;
  /// Takes the name of its table, for errors, unless it has one.
  virtual void begin(const std::string& table) = 0;
  /// An empty module for rows [first, end): a shard. `segments` are the bounds of all shards.
  virtual std::shared_ptr<ManagedCollisionModule> rebuild_with_output_id_range(
      std::int64_t first, std::int64_t end, const std::vector<std::int64_t>& segments) const = 0;
};

struct MchOptions {
  std::int64_t zch_size = 0;
  std::shared_ptr<const MCHEvictionPolicy> eviction_policy;
  std::int64_t eviction_interval = 1;
  /// With a bound and no function, ids outside [0, input_hash_size) are a ValueError, or folded
  /// into it by their hash.
  std::int64_t input_hash_size = std::numeric_limits<std::int64_t>::max();
  std::function<at::Tensor(const at::Tensor&, std::int64_t)> input_hash_func = nullptr;
  bool folds_out_of_range = false;
  std::string name = {};
  std::int64_t output_global_offset = 0;
  /// Bounds of the shards, at most 1025; none: of this one.
  std::vector<std::int64_t> output_segments = {};
  std::int64_t buckets = 1;
};

/// Gives the best ids a row each, by a policy; all others share the last row.
///
/// In training every call counts its ids; in every `eviction_interval`-th call, before its ids are
/// mapped, new ids may take the rows of worse ones. All of int64 are ids.
///
/// Buffers are the reference's: `_mch_sorted_raw_ids`, `_mch_remapped_ids_mapping`, `_mch_counts`,
/// `_mch_last_access_iter`, `_output_segments_tensor`, `_current_iter_tensor`.
class TESSERA_API MCHManagedCollisionModule final : public ManagedCollisionModule {
 public:
  /// Throws ValueError for options that cannot be.
  explicit MCHManagedCollisionModule(MchOptions options);
  ~MCHManagedCollisionModule() override;

  at::Tensor preprocess(const at::Tensor& ids) const override;
  void profile(const at::Tensor& ids, const at::Tensor& counts = {}) override;
  at::Tensor remap(const at::Tensor& ids) override;
  std::optional<at::Tensor> evict() override;
  std::int64_t output_size() const override { return options_.zch_size; }
  std::int64_t input_size() const override { return options_.input_hash_size; }
  std::int64_t buckets() const override { return options_.buckets; }
  std::int64_t open_slots() const override;
  void validate_state() override;
  void begin(const std::string& table) override;
  std::shared_ptr<ManagedCollisionModule> rebuild_with_output_id_range(
      std::int64_t first, std::int64_t end,
      const std::vector<std::int64_t>& segments) const override;

  const MchOptions& options() const noexcept { return options_; }
  std::int64_t num_ids() const noexcept { return num_ids_; }
  /// What unknown ids read; by default the last row.
  void set_unknown_row(std::int64_t row) noexcept { unknown_row_ = row; }

  /// Copies of the buffers by the reference's names, and what it lacks when there is some:
  /// `_tessera_history_ids` and `_tessera_history_iter`, ids that wait for the next interval, and
  /// `_tessera_num_ids` if 2^63 - 1 is among the ids.
  std::map<std::string, at::Tensor> state_dict() const;
  /// Throws ValueError for what is missing or of another size, and for rows that are no union of
  /// the saved shards, before anything changes.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

 private:
  struct Waiting {
    std::int64_t iteration;
    at::Tensor ids;
    at::Tensor counts;
  };
  MchMetadata metadata() const { return {counts_, last_access_iter_}; }
  MchSlots slots() const;
  void admit(std::int64_t iteration);
  /// Brings the slots into order and finds out how many have ids.
  void order_slots(std::int64_t least_ids);
  /// Makes the index anew if somebody else has changed the buffers.
  void follow_buffers();
  std::vector<std::int64_t> version() const;

  MchOptions options_;
  std::int64_t unknown_row_;
  at::Tensor ids_;
  at::Tensor rows_;
  at::Tensor counts_;
  at::Tensor last_access_iter_;
  at::Tensor segments_;
  at::Tensor iteration_;
  std::int64_t num_ids_ = 0;
  std::vector<Waiting> history_;
  std::optional<at::Tensor> evicted_;
  MchIndex index_;
  std::vector<std::int64_t> indexed_;  // which buffers, and which version of them
};

// ---- Collections: the ids of many tables

using ManagedCollisionModules = std::map<std::string, std::shared_ptr<ManagedCollisionModule>>;

/// Maps the ids of many tables, each with its own module, by the name of the table. A feature of
/// several tables is mapped for each: its keys in the result are `feature@table`.
class TESSERA_API ManagedCollisionCollection : public torch::nn::Module {
 public:
  /// Throws ValueError for a table without a module, or with one of another number of rows.
  ManagedCollisionCollection(const ManagedCollisionModules& modules,
                             std::vector<embedding::EmbeddingTableConfig> tables);

  /// The same bags with rows in place of ids, in the order of the tables. Throws ValueError, naming
  /// feature and table, for a feature that is not there.
  jagged::KeyedJaggedTensor forward(const jagged::KeyedJaggedTensor& features);

  const std::vector<embedding::EmbeddingTableConfig>& embedding_configs() const noexcept {
    return tables_;
  }
  /// The configs with the names that features have in the result.
  std::vector<embedding::EmbeddingTableConfig> mapped_configs() const;
  const ManagedCollisionModules& modules() const noexcept { return modules_; }
  /// The rows of every table that got another id, to be reset.
  std::map<std::string, std::optional<at::Tensor>> evict();
  std::map<std::string, std::int64_t> open_slots() const;

 private:
  ManagedCollisionModules modules_;
  std::vector<embedding::EmbeddingTableConfig> tables_;
};

}  // namespace tessera::collision
