#include "bindings.h"
#include "tessera/sharding/plan.h"

namespace tessera::python {
namespace {

using sharding::ModulePlan;
using sharding::ParameterSharding;
using sharding::Placement;
using sharding::Shard;
using sharding::ShardingPlan;
using sharding::Topology;

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
      .def(py::init<std::int64_t, std::int64_t, std::int64_t, std::int64_t, int>())
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
  module.def("check_module_plan", [](const std::string& operation,
                                     const std::vector<embedding::EmbeddingTableConfig>& tables,
                                     const ModulePlan& plan, int world_size, int local_size) {
    sharding::check_module_plan(operation, tables, plan, {world_size, local_size});
  });
  module.def("plan_text", [](std::map<std::string, ModulePlan> modules, int width) {
    return ShardingPlan{std::move(modules)}.str(width);
  });
  module.def("to_json", [](std::map<std::string, ModulePlan> modules) {
    return sharding::to_json(ShardingPlan{std::move(modules)});
  });
  module.def("plan_from_json",
             [](const std::string& text) { return sharding::plan_from_json(text).modules; });
}

}  // namespace

void bind_sharding(py::module_& module) {
  py::module_ sub = module.def_submodule("sharding", "Tables over ranks.");
  bind_placement(sub);
  bind_plan(sub);
}

}  // namespace tessera::python
