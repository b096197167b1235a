#include "arguments.h"
#include "bindings.h"
#include "named_rows.h"
#include "option_fields.h"
#include "tessera/sharding/plan.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"
#include "tessera/sharding/sharded_embedding_collection.h"

namespace tessera::python {
namespace {

using jagged::KeyedJaggedTensor;
using sharding::DistributedInput;
using sharding::InputDist;
using sharding::LocalShard;
using sharding::ModulePlan;
using sharding::ParameterSharding;
using sharding::Placement;
using sharding::Shard;
using sharding::ShardedEmbeddingBagCollection;
using sharding::ShardedEmbeddingCollection;
using sharding::ShardedOptions;
using sharding::ShardedSequenceOptions;
using sharding::ShardedTables;
using sharding::ShardingPlan;

void bind_placement(py::module_& module) {
  py::class_<Placement>(module, "Placement")
      .def("with_kernel",
           [](const Placement& self, const std::string& kernel) {
             return self.with_kernel(sharding::compute_kernel_of(kernel));
           })
      .def("place",
           [](const Placement& self, const embedding::EmbeddingTableConfig& table, int world_size,
              int local_size) { return self.place(table, {world_size, local_size}); })
      .def_property_readonly(
          "type", [](const Placement& self) { return std::string(name_of(self.type())); });
  module.def("data_parallel", &sharding::data_parallel);
  module.def("table_wise", &sharding::table_wise);
  module.def("row_wise", &sharding::row_wise);
  module.def("column_wise", &sharding::column_wise);
  module.def("table_row_wise", &sharding::table_row_wise);
  module.def("table_column_wise", &sharding::table_column_wise);
  module.def("grid_shard", &sharding::grid_shard);
}

void bind_plan(py::module_& module) {
  py::class_<Shard>(module, "Shard")
      .def(py::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, int>(), py::arg("row"),
           py::arg("column"), py::arg("rows"), py::arg("columns"), py::arg("rank"))
      .def_readonly("row", &Shard::row)
      .def_readonly("column", &Shard::column)
      .def_readonly("rows", &Shard::rows)
      .def_readonly("columns", &Shard::columns)
      .def_readonly("rank", &Shard::rank);
  py::class_<ParameterSharding>(module, "ParameterSharding")
      .def(py::init([](const std::string& type, const std::string& kernel, std::vector<int> ranks,
                       std::vector<Shard> shards) {
        return ParameterSharding{sharding::sharding_type_of(type),
                                 sharding::compute_kernel_of(kernel), std::move(ranks),
                                 std::move(shards)};
      }))
      .def_property_readonly(
          "type", [](const ParameterSharding& self) { return std::string(name_of(self.type)); })
      .def_property_readonly(
          "kernel", [](const ParameterSharding& self) { return std::string(name_of(self.kernel)); })
      .def_readonly("ranks", &ParameterSharding::ranks)
      .def_readonly("shards", &ParameterSharding::shards);
  module.def(
      "check_module_plan",
      [](const std::string& operation, const std::vector<embedding::EmbeddingTableConfig>& tables,
         const ModulePlan& plan, int world_size, int local_size) {
        sharding::check_module_plan(operation, tables, plan, {world_size, local_size});
      },
      py::arg("operation"), py::arg("tables"), py::arg("plan"), py::arg("world_size"),
      py::arg("local_size"));
  module.def("plan_text", [](std::map<std::string, ModulePlan> modules, int width) {
    return ShardingPlan{std::move(modules)}.str(width);
  });
  module.def("to_json", [](std::map<std::string, ModulePlan> modules) {
    return sharding::to_json(ShardingPlan{std::move(modules)});
  });
  module.def("plan_from_json",
             [](const std::string& text) { return sharding::plan_from_json(text).modules; });
}

template <class T>
void bind_awaitable(py::module_& module, const char* name) {
  py::class_<T>(module, name).def("wait", [](const T& self) { return self.wait(); }, Release());
}

void bind_sharded_options(py::module_& module) {
  options_class<ShardedOptions>(module, "ShardedOptions")
      .def_readwrite("optimizer", &ShardedOptions::optimizer)
      .def_readwrite("gradients", &ShardedOptions::gradients)
      .def_readwrite("bounds_check", &ShardedOptions::bounds_check)
      .def_readwrite("codecs", &ShardedOptions::codecs)
      .def_readwrite("local_size", &ShardedOptions::local_size)
      .def_readwrite("exact_row_norms", &ShardedOptions::exact_row_norms)
      .def_readwrite("weights_come_later", &ShardedOptions::weights_come_later)
      .def_readwrite("longest_bags", &ShardedOptions::longest_bags)
      .def_readwrite("host_rows", &ShardedOptions::host_rows)
      .def_readwrite("cache_policy", &ShardedOptions::cache_policy)
      .def_readwrite("device", &ShardedOptions::device);
  options_class<ShardedSequenceOptions, ShardedOptions>(module, "ShardedSequenceOptions")
      .def_readwrite("need_indices", &ShardedSequenceOptions::need_indices)
      .def_readwrite("use_index_dedup", &ShardedSequenceOptions::use_index_dedup);
  py::class_<LocalShard>(module, "LocalShard")
      .def_readonly("table", &LocalShard::table)
      .def_readonly("name", &LocalShard::name)
      .def_readonly("place", &LocalShard::place)
      .def_readonly("weight", &LocalShard::weight)
      .def_readonly("state", &LocalShard::state);
}

void bind_pending_rows(py::module_& module) {
  using Pending = comm::LazyAwaitable<embedding::NamedRows>;
  py::class_<Pending>(module, "PendingRows").def("wait", [](const Pending& self) {
    embedding::NamedRows rows;
    {
      const py::gil_scoped_release release;
      rows = self.wait();
    }
    return named_rows(std::move(rows));
  });
}

void bind_tables(py::module_& module) {
  const py::class_<DistributedInput> registered(module, "DistributedInput");
  bind_awaitable<comm::Awaitable<DistributedInput>>(module, "PendingInput");
  bind_awaitable<InputDist>(module, "PendingInputSplits");
  bind_awaitable<comm::LazyAwaitable<jagged::KeyedTensor>>(module, "PendingPooled");
  bind_pending_rows(module);
  py::class_<ShardedTables, std::shared_ptr<ShardedTables>>(module, "ShardedTables")
      .def("input_dist", &ShardedTables::input_dist, Release())
      .def("local_shards", &ShardedTables::local_shards)
      .def("optimizers", &ShardedTables::optimizers)
      .def("write_back", &ShardedTables::write_back, Release())
      .def("prefetch", &ShardedTables::prefetch, Release())
      .def("cache_statistics", &ShardedTables::cache_statistics)
      .def("gather_tables", &ShardedTables::gather_tables, Release())
      .def("step", &ShardedTables::step, Release())
      .def("zero_grad_rows", &ShardedTables::zero_grad_rows)
      .def("clip_grad_norm", &ShardedTables::clip_grad_norm, Release())
      .def("set_learning_rate", &ShardedTables::set_learning_rate);
  // Rows are left unset: whoever makes a module fills them.
  auto bags = py::class_<ShardedEmbeddingBagCollection, ShardedTables,
                         std::shared_ptr<ShardedEmbeddingBagCollection>>(
      module, "ShardedEmbeddingBagCollection", py::multiple_inheritance());
  using Later = comm::LazyAwaitable<jagged::KeyedTensor>;
  using Bags = ShardedEmbeddingBagCollection;
  bags.def(py::init([](std::vector<embedding::EmbeddingBagConfig> tables, ModulePlan plan,
                       const comm::Group& group, bool is_weighted, const ShardedOptions& options) {
             const py::gil_scoped_release release;
             for (auto& table : tables) table.init_fn = [](const at::Tensor&) {};
             return std::make_shared<Bags>(std::move(tables), std::move(plan), group, is_weighted,
                                           options);
           }),
           py::arg("tables"), py::arg("plan"), py::arg("group"), py::arg("is_weighted"),
           py::arg("options"))
      .def("compute_and_output_dist",
           static_cast<Later (Bags::*)(const DistributedInput&)>(&Bags::compute_and_output_dist),
           Release())
      .def("compute_and_output_dist",
           static_cast<Later (Bags::*)(const DistributedInput&, const at::Tensor&)>(
               &Bags::compute_and_output_dist),
           Release());
  auto rows = py::class_<ShardedEmbeddingCollection, ShardedTables,
                         std::shared_ptr<ShardedEmbeddingCollection>>(
      module, "ShardedEmbeddingCollection", py::multiple_inheritance());
  rows.def(py::init([](std::vector<embedding::EmbeddingConfig> tables, ModulePlan plan,
                       const comm::Group& group, const ShardedSequenceOptions& options) {
        const py::gil_scoped_release release;
        for (auto& table : tables) table.init_fn = [](const at::Tensor&) {};
        return std::make_shared<ShardedEmbeddingCollection>(std::move(tables), std::move(plan),
                                                            group, options);
      }))
      .def("compute_and_output_dist", &ShardedEmbeddingCollection::compute_and_output_dist,
           Release());
  module.def(
      "fused_input_dist",
      [](const std::vector<std::pair<std::shared_ptr<ShardedTables>, KeyedJaggedTensor>>& inputs) {
        std::vector<std::pair<ShardedTables*, KeyedJaggedTensor>> plain;
        for (const auto& [tables, features] : inputs) plain.emplace_back(tables.get(), features);
        return sharding::fused_input_dist(plain);
      },
      Release());
}

}  // namespace

void bind_sharding(py::module_& module) {
  py::module_ sub = module.def_submodule("sharding", "Tables over ranks.");
  bind_placement(sub);
  bind_plan(sub);
  bind_sharded_options(sub);
  bind_tables(sub);
}

}  // namespace tessera::python
