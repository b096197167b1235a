// tessera/sharding/sharded_quant_embedding_bag_collection.h — tables with rows in few bits over the
// devices of one process.
//
// No group: nothing is communicated. A "rank" of a plan is a place in a list of devices, in which
// one device may stand several times. Ids are cut, each device looks up, and the results are
// gathered. For models that only predict.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/export.h"
#include "tessera/embedding/feature_processor.h"
#include "tessera/embedding/quantised_collections.h"
#include "tessera/sharding/comm_ops.h"
#include "tessera/sharding/plan.h"

namespace tessera::sharding {

/// One for each device.
using KJTList = std::vector<jagged::KeyedJaggedTensor>;

/// Cuts features by numbers of keys and copies part r to device r.
class TESSERA_API KJTOneToAll {
 public:
  /// Throws ValueError unless there is a number for each device.
  KJTOneToAll(Sizes splits, std::vector<at::Device> devices);
  KJTList forward(const jagged::KeyedJaggedTensor& features) const;

 private:
  Sizes splits_;
  std::vector<at::Device> devices_;
};

/// Moves parts to one device and puts them side by side along `cat_dim`. The forwards of this and
/// the next two throw ValueError unless there are `world_size` parts.
class TESSERA_API EmbeddingsAllToOne {
 public:
  EmbeddingsAllToOne(at::Device device, std::size_t world_size, std::int64_t cat_dim);
  at::Tensor forward(const std::vector<at::Tensor>& parts) const;

 private:
  at::Device device_;
  std::size_t world_size_;
  std::int64_t cat_dim_;
};

/// Moves parts to one device and sums them, in the order of the devices.
class TESSERA_API EmbeddingsAllToOneReduce {
 public:
  EmbeddingsAllToOneReduce(at::Device device, std::size_t world_size);
  at::Tensor forward(const std::vector<at::Tensor>& parts) const;

 private:
  at::Device device_;
  std::size_t world_size_;
};

/// Moves parts to one device.
class TESSERA_API SeqEmbeddingsAllToOne {
 public:
  SeqEmbeddingsAllToOne(at::Device device, std::size_t world_size);
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& parts) const;

 private:
  at::Device device_;
  std::size_t world_size_;
};

/// Tables that one kernel object looks up: parts of tables, with the features that use them.
struct GroupedQuantConfig {
  std::vector<embedding::QuantisedTableSpec> tables;
  embedding::PoolingType pooling = embedding::PoolingType::kSum;
  bool is_weighted = false;
  bool has_feature_processor = false;

  TESSERA_API std::vector<std::string> feature_names() const;
};

/// Rows by name.
using NamedRowBlocks = std::vector<std::pair<std::string, at::Tensor>>;

/// The tables of one device: what the pooled and the unpooled lookup share.
class TESSERA_API MetaInferGroupedLookup : public torch::nn::Module {
 public:
  at::Device device() const noexcept { return options_.device; }
  const std::vector<GroupedQuantConfig>& grouped_configs() const noexcept { return configs_; }
  /// The objects that look up, one for each group.
  const std::vector<std::shared_ptr<embedding::QuantisedTables>>& tbes() const noexcept {
    return tbes_;
  }
  /// `<table>.weight`, shared.
  NamedRowBlocks named_rows() const;
  /// Copies rows of the same names. Throws ValueError for another width, naming both, and, if
  /// `strict`, for names that are missing or too much; nothing is changed then.
  void load_rows(const NamedRowBlocks& rows, bool strict = true);
  /// There is no cache: they do nothing.
  void flush() {}
  void purge() {}

  /// Features are those of the groups, in order. Throws IndexError naming an id that is not a row.
  virtual at::Tensor forward(const jagged::KeyedJaggedTensor& features) = 0;

 protected:
  MetaInferGroupedLookup(std::vector<GroupedQuantConfig> configs, bool is_pooled,
                         const embedding::QuantOptions& options,
                         std::shared_ptr<embedding::FeatureProcessor> processor);
  at::Tensor look_up(const jagged::KeyedJaggedTensor& features, std::int64_t dim);

 private:
  std::vector<GroupedQuantConfig> configs_;
  embedding::QuantOptions options_;
  std::shared_ptr<embedding::FeatureProcessor> processor_;
  std::vector<std::shared_ptr<embedding::QuantisedTables>> tbes_;
};

/// Pools the rows of the tables of one device: [batch, columns of all groups].
class TESSERA_API MetaInferGroupedPooledEmbeddingsLookup : public MetaInferGroupedLookup {
 public:
  explicit MetaInferGroupedPooledEmbeddingsLookup(
      std::vector<GroupedQuantConfig> configs, const embedding::QuantOptions& options = {},
      std::shared_ptr<embedding::FeatureProcessor> processor = nullptr);
  at::Tensor forward(const jagged::KeyedJaggedTensor& features) override;
};

/// The rows of every id in the tables of one device: [ids, columns], one width for all.
class TESSERA_API MetaInferGroupedEmbeddingsLookup : public MetaInferGroupedLookup {
 public:
  explicit MetaInferGroupedEmbeddingsLookup(std::vector<GroupedQuantConfig> configs,
                                            const embedding::QuantOptions& options = {});
  at::Tensor forward(const jagged::KeyedJaggedTensor& features) override;
};

/// Looks up on several devices, GPUs at the same time, and joins what their lookups know.
class TESSERA_API InferGroupedLookupMixin : public torch::nn::Module {
 public:
  /// One result for each device that has tables. Throws ValueError unless there are features for
  /// each device.
  std::vector<at::Tensor> forward(const KJTList& features);
  NamedRowBlocks named_rows() const;
  void load_rows(const NamedRowBlocks& rows, bool strict = true);
  /// Null for a device without tables.
  const std::vector<std::shared_ptr<MetaInferGroupedLookup>>& lookups() const noexcept {
    return lookups_;
  }

 protected:
  std::vector<std::shared_ptr<MetaInferGroupedLookup>> lookups_;
};

/// Pooled lookups of each device. `options.device` is not read.
class TESSERA_API InferGroupedPooledEmbeddingsLookup : public InferGroupedLookupMixin {
 public:
  InferGroupedPooledEmbeddingsLookup(
      const std::vector<std::vector<GroupedQuantConfig>>& configs_per_device,
      const std::vector<at::Device>& devices, embedding::QuantOptions options = {});
};

/// Unpooled lookups of each device.
class TESSERA_API InferGroupedEmbeddingsLookup : public InferGroupedLookupMixin {
 public:
  InferGroupedEmbeddingsLookup(
      const std::vector<std::vector<GroupedQuantConfig>>& configs_per_device,
      const std::vector<at::Device>& devices, embedding::QuantOptions options = {});
};

/// A table and how it lies.
struct QuantShardingInfo {
  embedding::EmbeddingBagConfig table;
  ParameterSharding sharding;
};

/// Tables that are sharded in one way: who gets which features, and what becomes of the results.
class TESSERA_API InferEmbeddingBagSharding {
 public:
  InferEmbeddingBagSharding(ShardingType type, std::vector<QuantShardingInfo> infos,
                            std::vector<at::Device> devices);

  ShardingType type() const noexcept { return type_; }
  const std::vector<QuantShardingInfo>& infos() const noexcept { return infos_; }
  /// The features of each device, in the order they are sent.
  std::vector<std::vector<std::string>> feature_names_per_device() const;
  std::vector<std::vector<GroupedQuantConfig>> grouped_configs_per_device(
      bool is_weighted, bool has_feature_processor = false) const;
  KJTList input_dist(const jagged::KeyedJaggedTensor& features) const;
  /// [batch, columns], tables in order, on the first device.
  at::Tensor output_dist(const std::vector<at::Tensor>& parts) const;

  /// Which shard of which table, for each device in the order of its lookup.
  struct Place {
    std::size_t table;
    Shard shard;
  };
  const std::vector<std::vector<Place>>& places() const noexcept { return places_; }

 private:
  KJTList cut_rows(const jagged::KeyedJaggedTensor& features) const;
  at::Tensor sum_rows(const std::vector<at::Tensor>& parts) const;

  ShardingType type_;
  std::vector<QuantShardingInfo> infos_;
  std::vector<at::Device> devices_;
  std::vector<std::vector<Place>> places_;
};

/// kTableWise, kRowWise or kColumnWise. Throws ValueError for another type, two shards of a table's
/// rows on one device, and columns that are cut inside a byte.
TESSERA_API InferEmbeddingBagSharding create_infer_embedding_bag_sharding(
    ShardingType type, std::vector<QuantShardingInfo> infos, std::vector<at::Device> devices);

/// The features with lengths of one dimension; the same object if they have that.
TESSERA_API jagged::KeyedJaggedTensor flatten_feature_lengths(
    const jagged::KeyedJaggedTensor& features);

/// Pools rows of quantised tables that lie on several devices. The rows are copied from the module:
/// the result is the module's at once, rows cut over devices to the rounding of sums.
class TESSERA_API ShardedQuantEmbeddingBagCollection : public torch::nn::Module {
 public:
  /// `plan` places tables on the devices 0, 1, … of the list. Throws ValueError as
  /// check_module_plan and create_infer_embedding_bag_sharding.
  ShardedQuantEmbeddingBagCollection(const embedding::QuantEmbeddingBagCollection& module,
                                     const ModulePlan& plan, std::vector<at::Device> devices);

  /// For each type of sharding the features of each device.
  std::vector<KJTList> input_dist(const jagged::KeyedJaggedTensor& features) const;
  /// What the devices find, for each type of sharding.
  std::vector<std::vector<at::Tensor>> compute(const std::vector<KJTList>& features);
  jagged::KeyedTensor output_dist(const std::vector<std::vector<at::Tensor>>& parts) const;
  jagged::KeyedTensor compute_and_output_dist(const std::vector<KJTList>& features);
  /// Keys as in the module.
  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);

  /// The unsharded module with the rows of the shards: copies, on the CPU.
  std::shared_ptr<embedding::QuantEmbeddingBagCollection> whole() const;
  /// Cuts the rows of whole tables into the shards. Throws ValueError for another shape.
  void load(const std::string& table, const at::Tensor& rows);
  /// The same tables with rows of their own.
  std::shared_ptr<ShardedQuantEmbeddingBagCollection> copy() const;

  const std::vector<embedding::EmbeddingBagConfig>& embedding_bag_configs() const noexcept {
    return configs_;
  }
  const std::vector<InferEmbeddingBagSharding>& shardings() const noexcept { return shardings_; }
  /// The objects that look up, with the groups they are for.
  std::vector<std::pair<std::shared_ptr<embedding::QuantisedTables>, GroupedQuantConfig>>
  tbes_configs() const;

 protected:
  ShardedQuantEmbeddingBagCollection(const embedding::QuantEmbeddingBagCollection& module,
                                     const ModulePlan& plan, std::vector<at::Device> devices,
                                     bool has_feature_processor);

 private:
  template <typename Visit>
  void for_each_part(const std::string& table, const Visit& visit) const;

  std::vector<embedding::EmbeddingBagConfig> configs_;
  ModulePlan plan_;
  std::vector<at::Device> devices_;
  bool is_weighted_;
  bool has_feature_processor_;
  embedding::QuantOptions options_;
  std::vector<InferEmbeddingBagSharding> shardings_;
  std::vector<std::shared_ptr<InferGroupedPooledEmbeddingsLookup>> lookups_;
};

/// The same behind processors that give features weights, one for each device, on it.
class TESSERA_API ShardedQuantFeatureProcessedEmbeddingBagCollection
    : public ShardedQuantEmbeddingBagCollection {
 public:
  /// Throws ValueError for tables that are cut by rows: a processor sees whole bags.
  ShardedQuantFeatureProcessedEmbeddingBagCollection(
      const embedding::QuantEmbeddingBagCollection& module, const ModulePlan& plan,
      std::vector<at::Device> devices,
      std::vector<std::shared_ptr<embedding::FeatureProcessor>> processors);

  /// Processes the features of each device by its processor.
  KJTList apply_feature_processor(const KJTList& features) const;
  jagged::KeyedTensor forward(const jagged::KeyedJaggedTensor& features);

 private:
  std::vector<std::shared_ptr<embedding::FeatureProcessor>> processors_;
};

/// What sharders of quantised tables know: how tables may lie, and what they take.
class TESSERA_API BaseQuantEmbeddingSharder {
 public:
  /// The tables to shard, all if empty.
  explicit BaseQuantEmbeddingSharder(std::vector<std::string> shardable_params = {});
  virtual ~BaseQuantEmbeddingSharder();

  virtual std::vector<ShardingType> sharding_types() const;
  /// "quant"; on CUDA also "quant_uvm" and "quant_uvm_caching", which run as it.
  virtual std::vector<std::string> compute_kernels(at::DeviceType device) const;
  /// Tables by name. Throws ValueError if some of the module's are named and others not.
  std::map<std::string, at::Tensor> shardable_parameters(
      const embedding::QuantEmbeddingBagCollection& module) const;
  /// Bytes of the rows, by memory: "hbm" on CUDA, else "ddr".
  std::map<std::string, std::int64_t> storage_usage(const at::Tensor& rows,
                                                    at::DeviceType device) const;

 private:
  std::vector<std::string> shardable_params_;
};

class TESSERA_API QuantEmbeddingBagCollectionSharder : public BaseQuantEmbeddingSharder {
 public:
  using BaseQuantEmbeddingSharder::BaseQuantEmbeddingSharder;
  std::shared_ptr<ShardedQuantEmbeddingBagCollection> shard(
      const embedding::QuantEmbeddingBagCollection& module, const ModulePlan& plan,
      std::vector<at::Device> devices) const;
};

class TESSERA_API QuantFeatureProcessedEmbeddingBagCollectionSharder
    : public BaseQuantEmbeddingSharder {
 public:
  using BaseQuantEmbeddingSharder::BaseQuantEmbeddingSharder;
  /// Whole tables or columns.
  std::vector<ShardingType> sharding_types() const override;
  /// "quant".
  std::vector<std::string> compute_kernels(at::DeviceType device) const override;
  std::shared_ptr<ShardedQuantFeatureProcessedEmbeddingBagCollection> shard(
      const embedding::QuantEmbeddingBagCollection& module, const ModulePlan& plan,
      std::vector<at::Device> devices,
      std::vector<std::shared_ptr<embedding::FeatureProcessor>> processors) const;
};

}  // namespace tessera::sharding
