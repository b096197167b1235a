#include "arguments.h"
#include "bindings.h"
#include "named_rows.h"
#include "option_fields.h"
#include "tessera/embedding/collection_lookup.h"
#include "tessera/embedding/embedding_bag.h"
#include "tessera/embedding/position_weighted.h"

namespace tessera::python {
namespace {

using at::Tensor;
using embedding::BoundsCheckMode;
using embedding::CachePolicy;
using embedding::CollectionLookup;
using embedding::DataType;
using embedding::EmbeddingTableConfig;
using embedding::GradientForm;
using embedding::LookupInput;
using embedding::OptimizerKind;
using embedding::OptimizerOptions;
using embedding::PoolingType;
using embedding::RowCacheStatistics;
using embedding::RowOptimizer;
using embedding::Table;
using embedding::TableBatch;
using embedding::TableBatchOptions;
using embedding::WeightDecayMode;
using jagged::JaggedTensor;
using jagged::KeyedJaggedTensor;

void bind_enums(py::module_& module) {
  py::enum_<DataType>(module, "DataType")
      .value("FP32", DataType::kFP32)
      .value("FP16", DataType::kFP16)
      .value("BF16", DataType::kBF16)
      .value("INT8", DataType::kINT8)
      .value("INT4", DataType::kINT4)
      .value("INT2", DataType::kINT2);
  py::enum_<PoolingType>(module, "PoolingType")
      .value("SUM", PoolingType::kSum)
      .value("MEAN", PoolingType::kMean)
      .value("NONE", PoolingType::kNone);
  py::enum_<BoundsCheckMode>(module, "BoundsCheckMode")
      .value("FATAL", BoundsCheckMode::kFatal)
      .value("WARNING", BoundsCheckMode::kWarning)
      .value("IGNORE", BoundsCheckMode::kIgnore);
  py::enum_<GradientForm>(module, "GradientForm")
      .value("DENSE", GradientForm::kDense)
      .value("SPARSE", GradientForm::kSparse)
      .value("FUSED", GradientForm::kFused);
  py::enum_<CachePolicy>(module, "CachePolicy")
      .value("LRU", CachePolicy::kLru)
      .value("LFU", CachePolicy::kLfu);
  py::class_<RowCacheStatistics>(module, "RowCacheStatistics")
      .def_readonly("table", &RowCacheStatistics::table)
      .def_readonly("num_rows", &RowCacheStatistics::num_rows)
      .def_readonly("cached_rows", &RowCacheStatistics::cached_rows)
      .def_readonly("num_calls", &RowCacheStatistics::num_calls)
      .def_readonly("num_found", &RowCacheStatistics::num_found)
      .def_readonly("num_loaded", &RowCacheStatistics::num_loaded)
      .def_readonly("num_grown", &RowCacheStatistics::num_grown);
  py::enum_<OptimizerKind>(module, "OptimizerKind")
      .value("SGD", OptimizerKind::kSgd)
      .value("ADAGRAD", OptimizerKind::kAdagrad)
      .value("ROWWISE_ADAGRAD", OptimizerKind::kRowWiseAdagrad)
      .value("ADAM", OptimizerKind::kAdam)
      .value("ADAMW", OptimizerKind::kAdamW)
      .value("PARTIAL_ROWWISE_ADAM", OptimizerKind::kPartialRowWiseAdam)
      .value("LAMB", OptimizerKind::kLamb)
      .value("PARTIAL_ROWWISE_LAMB", OptimizerKind::kPartialRowWiseLamb)
      .value("LARS_SGD", OptimizerKind::kLarsSgd);
  py::enum_<WeightDecayMode>(module, "WeightDecayMode")
      .value("L2", WeightDecayMode::kL2)
      .value("DECOUPLED", WeightDecayMode::kDecoupled);
}

void bind_options(py::module_& module) {
  py::class_<EmbeddingTableConfig>(module, "EmbeddingTableConfig")
      .def(py::init([](std::int64_t num_embeddings, std::int64_t embedding_dim, std::string name,
                       DataType data_type, std::vector<std::string> feature_names,
                       PoolingType pooling) {
             return EmbeddingTableConfig{.num_embeddings = num_embeddings,
                                         .embedding_dim = embedding_dim,
                                         .name = std::move(name),
                                         .data_type = data_type,
                                         .feature_names = std::move(feature_names),
                                         .pooling = pooling};
           }),
           py::arg("num_embeddings"), py::arg("embedding_dim"), py::arg("name"),
           py::arg("data_type"), py::arg("feature_names"), py::arg("pooling"));
  options_class<OptimizerOptions>(module, "OptimizerOptions")
      .def_readwrite("kind", &OptimizerOptions::kind)
      .def_readwrite("learning_rate", &OptimizerOptions::learning_rate)
      .def_readwrite("eps", &OptimizerOptions::eps)
      .def_readwrite("beta1", &OptimizerOptions::beta1)
      .def_readwrite("beta2", &OptimizerOptions::beta2)
      .def_readwrite("weight_decay", &OptimizerOptions::weight_decay)
      .def_readwrite("weight_decay_mode", &OptimizerOptions::weight_decay_mode)
      .def_readwrite("momentum", &OptimizerOptions::momentum)
      .def_readwrite("eta", &OptimizerOptions::eta)
      .def_readwrite("initial_accumulator", &OptimizerOptions::initial_accumulator)
      .def_readwrite("max_gradient", &OptimizerOptions::max_gradient)
      .def_readwrite("stochastic_rounding", &OptimizerOptions::stochastic_rounding)
      .def_readwrite("seed", &OptimizerOptions::seed);
  options_class<TableBatchOptions>(module, "TableBatchOptions")
      .def_readwrite("gradients", &TableBatchOptions::gradients)
      .def_readwrite("optimizer", &TableBatchOptions::optimizer)
      .def_readwrite("bounds_check", &TableBatchOptions::bounds_check);
  module.def("embedding_names_by_table", &embedding::embedding_names_by_table);
  module.def("check_tables",
             [](const std::string& operation, const std::vector<EmbeddingTableConfig>& tables) {
               embedding::check_tables(operation, tables);
             });
}

void bind_optimizer(py::module_& module) {
  py::class_<RowOptimizer, std::shared_ptr<RowOptimizer>>(module, "RowOptimizer")
      .def(py::init<std::vector<std::pair<std::string, Tensor>>, OptimizerOptions>())
      .def("step", &RowOptimizer::step, Release())
      .def("zero_grad", &RowOptimizer::zero_grad)
      .def("clip_grad_norm", &RowOptimizer::clip_grad_norm, Release())
      .def("clip_grad_value", &RowOptimizer::clip_grad_value, Release())
      .def_property_readonly("options", &RowOptimizer::options)
      .def("set_learning_rate", &RowOptimizer::set_learning_rate)
      .def_property_readonly("num_steps", &RowOptimizer::num_steps)
      .def("state_dict", &RowOptimizer::state_dict)
      .def("load_state_dict", &RowOptimizer::load_state_dict)
      .def("track_rows", &RowOptimizer::track_rows)
      .def("has_table", &RowOptimizer::has_table)
      .def("stepped_rows",
           [](const RowOptimizer& self, const std::string& table) -> MaybeTensor {
             const Tensor rows = self.stepped_rows(table);
             return rows.defined() ? MaybeTensor(rows) : std::nullopt;
           })
      .def("forget_rows", &RowOptimizer::forget_rows);
}

void bind_lookup(py::module_& module) {
  module.def("empty_rows", &embedding::empty_rows);
  py::class_<TableBatch>(module, "TableBatch")
      .def(py::init([](const std::vector<std::tuple<std::string, Tensor, PoolingType>>& tables,
                       const std::vector<std::pair<std::string, std::int64_t>>& features,
                       const TableBatchOptions& options) {
        std::vector<Table> own_tables;
        for (const auto& [name, weight, pooling] : tables) {
          own_tables.push_back({name, weight, pooling});
        }
        std::vector<embedding::Feature> own_features;
        for (const auto& [name, table] : features) own_features.push_back({name, table});
        return TableBatch(std::move(own_tables), std::move(own_features), options);
      }))
      .def(
          "pooled",
          [](const TableBatch& self, const Tensor& ids, const Tensor& offsets,
             const MaybeTensor& weights, const std::vector<std::int64_t>& batch_sizes) {
            return self.pooled({ids, offsets, tensor_of(weights), batch_sizes});
          },
          Release())
      .def(
          "sequence",
          [](const TableBatch& self, const Tensor& ids, const Tensor& offsets,
             const MaybeTensor& weights, const std::vector<std::int64_t>& batch_sizes) {
            return self.sequence({ids, offsets, tensor_of(weights), batch_sizes});
          },
          Release())
      .def_property_readonly("optimizer", &TableBatch::optimizer);
  py::class_<CollectionLookup>(module, "CollectionLookup")
      .def(py::init<std::string, std::vector<EmbeddingTableConfig>, bool, TableBatchOptions>())
      .def("pooled", &CollectionLookup::pooled, Release())
      .def("sequence",
           [](const CollectionLookup& self, const KeyedJaggedTensor& features,
              const std::vector<Tensor>& weights, bool need_indices) {
             embedding::NamedRows rows;
             {
               const py::gil_scoped_release release;
               rows = self.sequence(features, weights, need_indices);
             }
             return named_rows(std::move(rows));
           })
      .def("optimizer", [](const CollectionLookup& self, const std::vector<Tensor>& weights) {
        return self.bind(weights).optimizer();
      });
}

void bind_position_weights(py::module_& module) {
  module.def("position_weights",
             py::overload_cast<const KeyedJaggedTensor&, const embedding::PositionWeights&>(
                 &embedding::position_weights),
             Release());
  module.def("position_weights_of_feature",
             py::overload_cast<const JaggedTensor&, const Tensor&, bool, const std::string&>(
                 &embedding::position_weights),
             Release());
}

}  // namespace

void bind_embedding(py::module_& module) {
  py::module_ sub = module.def_submodule("embedding", "Embedding tables on one rank.");
  bind_enums(sub);
  bind_options(sub);
  bind_optimizer(sub);
  bind_lookup(sub);
  bind_position_weights(sub);
}

}  // namespace tessera::python
