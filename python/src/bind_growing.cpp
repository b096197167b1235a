#include "bind_growing.h"

#include <ATen/Functions.h>

#include "arguments.h"
#include "bindings.h"
#include "option_fields.h"
#include "tessera/collision/growing_tables.h"

namespace tessera::python {
namespace {

using at::Tensor;
using collision::GrowingChanges;
using collision::GrowingEmbeddingBagCollection;
using collision::GrowingEmbeddingCollection;
using collision::GrowingOptions;
using collision::GrowingRows;
using collision::GrowingSteps;
using collision::GrowingTable;
using collision::GrowingTables;
using collision::Growth;
using collision::UnknownIds;
using Wishes = std::map<std::string, sharding::Placement>;

Tensor long_tensor(const std::vector<std::int64_t>& numbers) {
  return at::tensor(numbers, at::kLong);
}
std::vector<std::int64_t> long_numbers(const Tensor& tensor) {
  const Tensor own = tensor.to(at::kCPU, at::kLong).contiguous();
  const auto* first = own.const_data_ptr<std::int64_t>();
  return {first, first + own.numel()};
}

/// Ids, rows, counts and last steps.
std::tuple<Tensor, Tensor, Tensor, Tensor> tensors_of(const collision::IdList& list) {
  return {long_tensor(list.ids), long_tensor(list.rows), long_tensor(list.counts),
          long_tensor(list.last_steps)};
}

py::dict rows_as_dict(const GrowingRows& rows) {
  Tensor counters = at::empty({static_cast<std::int64_t>(rows.sketch.counters.size())}, at::kByte);
  std::copy(rows.sketch.counters.begin(), rows.sketch.counters.end(),
            counters.data_ptr<std::uint8_t>());
  py::dict found;
  found["ids"] = long_tensor(rows.ids.ids);
  found["counts"] = long_tensor(rows.ids.counts);
  found["last_steps"] = long_tensor(rows.ids.last_steps);
  found["sketch_buckets"] = long_tensor(rows.sketch.buckets);
  found["sketch_counters"] = counters;
  found["sketch_sightings"] = long_tensor(rows.sketch.sightings);
  found["weight"] = rows.weight;
  found["state"] = rows.state;
  return found;
}

GrowingRows rows_from_dict(const py::dict& given) {
  const auto tensor = [&](const char* name) { return given[name].cast<Tensor>(); };
  GrowingRows rows;
  rows.ids.ids = long_numbers(tensor("ids"));
  rows.ids.counts = long_numbers(tensor("counts"));
  rows.ids.last_steps = long_numbers(tensor("last_steps"));
  rows.sketch.buckets = long_numbers(tensor("sketch_buckets"));
  rows.sketch.sightings = long_numbers(tensor("sketch_sightings"));
  const Tensor counters = tensor("sketch_counters").to(at::kCPU, at::kByte).contiguous();
  rows.sketch.counters.assign(counters.const_data_ptr<std::uint8_t>(),
                              counters.const_data_ptr<std::uint8_t>() + counters.numel());
  rows.weight = tensor("weight");
  rows.state = given["state"].cast<std::map<std::string, Tensor>>();
  return rows;
}

void bind_growing_configs(py::module_& module) {
  py::enum_<UnknownIds>(module, "UnknownIds")
      .value("ROW", UnknownIds::kRow)
      .value("ZERO", UnknownIds::kZero)
      .value("INIT", UnknownIds::kInit);
  py::class_<GrowingTable>(module, "GrowingTable")
      .def(py::init<>())
      .def_readwrite("config", &GrowingTable::config)
      .def("set_bounds",
           [](GrowingTable& self, std::optional<double> low, std::optional<double> high) {
             self.config.weight_init_min = low;
             self.config.weight_init_max = high;
           })
      .def_readwrite("ids", &GrowingTable::ids)
      .def_readwrite("unknown", &GrowingTable::unknown)
      .def_readwrite("seed", &GrowingTable::seed);
  options_class<GrowingOptions>(module, "GrowingOptions")
      .def_readwrite("optimizer", &GrowingOptions::optimizer)
      .def_readwrite("codecs", &GrowingOptions::codecs)
      .def_readwrite("local_size", &GrowingOptions::local_size);
  py::class_<Growth>(module, "Growth")
      .def_readonly("table", &Growth::table)
      .def_readonly("ids", &Growth::ids)
      .def_readonly("admitted", &Growth::admitted)
      .def_readonly("refused", &Growth::refused)
      .def_readonly("evicted", &Growth::evicted)
      .def_readonly("sightings", &Growth::sightings)
      .def_readonly("hits", &Growth::hits)
      .def_readonly("bytes", &Growth::bytes);
}

template <class Collection>
void bind_growing_collection(py::module_& module, const char* name) {
  py::class_<Collection, GrowingTables, std::shared_ptr<Collection>>(module, name,
                                                                     py::multiple_inheritance())
      .def(py::init([](std::vector<GrowingTable> tables, const comm::Group& group,
                       const GrowingOptions& options, const Wishes& wishes) {
        const py::gil_scoped_release release;
        return std::make_shared<Collection>(std::move(tables), group, options, wishes);
      }))
      .def("compute_and_output_dist", &Collection::compute_and_output_dist, Release());
}

}  // namespace

void bind_growing(py::module_& parent) {
  py::module_ module = parent.attr("collision");
  bind_growing_configs(module);
  py::class_<GrowingChanges, std::shared_ptr<GrowingChanges>>(module, "GrowingChanges")
      .def("forget", &GrowingChanges::forget)
      .def("changed_ids",
           [](const GrowingChanges& self, const std::string& table) {
             return tensors_of(self.changed_ids(table));
           })
      .def("removed_ids",
           [](const GrowingChanges& self, const std::string& table) {
             return long_tensor(self.removed_ids(table));
           })
      .def("take_removed_ids", [](GrowingChanges& self, const std::string& table) {
        return long_tensor(self.take_removed_ids(table));
      });
  py::class_<GrowingTables, sharding::ShardedTables, std::shared_ptr<GrowingTables>>(
      module, "GrowingTables", py::multiple_inheritance())
      .def("growth", &GrowingTables::growth)
      .def("total_growth", &GrowingTables::total_growth, Release())
      .def("num_calls", &GrowingTables::num_calls)
      .def("set_training", [](GrowingTables& self, bool is_on) { self.train(is_on); })
      .def("export_ids",
           [](const GrowingTables& self, const std::string& table) {
             return tensors_of(self.export_ids(table));
           })
      .def("unknown_row",
           [](const GrowingTables& self, const std::string& table) -> std::optional<Tensor> {
             const Tensor row = self.unknown_row(table);
             return row.defined() ? std::optional(row) : std::nullopt;
           })
      .def("unknown_state", &GrowingTables::unknown_state)
      .def("track_changes", &GrowingTables::track_changes)
      .def("export_rows",
           [](const GrowingTables& self, const std::string& table) {
             return rows_as_dict(self.export_rows(table));
           })
      .def("load_rows", [](GrowingTables& self, const std::string& table,
                           const py::dict& rows) { self.load_rows(table, rows_from_dict(rows)); })
      .def("prepare_rows",
           [](GrowingTables& self, const py::dict& tables) {
             std::map<std::string, GrowingRows> rows;
             for (const auto& [table, given] : tables) {
               rows.emplace(table.cast<std::string>(), rows_from_dict(given.cast<py::dict>()));
             }
             self.prepare_rows(rows);
           })
      .def("take_prepared_rows", &GrowingTables::take_prepared_rows)
      .def("forget_prepared_rows", &GrowingTables::forget_prepared_rows)
      .def("num_steps",
           [](const GrowingTables& self) {
             const GrowingSteps steps = self.num_steps();
             return std::pair(steps.rows, steps.unknown);
           })
      .def("set_progress",
           [](GrowingTables& self, std::int64_t num_calls, std::int64_t rows,
              std::int64_t unknown) { self.set_progress(num_calls, {rows, unknown}); });
  bind_growing_collection<GrowingEmbeddingBagCollection>(module, "GrowingEmbeddingBagCollection");
  bind_growing_collection<GrowingEmbeddingCollection>(module, "GrowingEmbeddingCollection");
}

}  // namespace tessera::python
