#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <exception>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "arguments.h"
#include "bindings.h"
#include "option_fields.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/replicas.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/tables.h"

namespace tessera::python {
namespace {

using namespace checkpoint;
using MaybeStep = std::optional<std::int64_t>;
using Shape = std::vector<std::int64_t>;
/// Offsets, tensor, touched rows.
using PieceTuple = std::tuple<Shape, at::Tensor, std::optional<at::Tensor>>;
/// Name, shape, pieces, whether replicated, owner.
using PlacedTuple = std::tuple<std::string, Shape, std::vector<PieceTuple>, bool, int>;

/// Prefix of the weights (none: somebody else saves them), prefix of the state, parts.
using TablesTuple =
    std::tuple<std::optional<std::string>, std::string, std::vector<TableShard>, Values>;
/// Prefix, hook, rank, size.
using HookTuple = std::tuple<std::string, std::shared_ptr<data_parallel::CommHook>, int, int>;

/// What a state dict holds besides plain values.
struct Leaves {
  std::vector<PlacedTuple> tensors;
  std::vector<TablesTuple> tables;
  std::vector<HookTuple> hooks;
};

/// Parts of tables as they are now; Python takes the values from the report of a load.
class GivenTables final : public TableSource {
 public:
  GivenTables(std::vector<TableShard> shards, Values values)
      : shards_(std::move(shards)), values_(std::move(values)) {}
  std::vector<TableShard> shards() override { return shards_; }
  Values values() override { return values_; }

 private:
  std::vector<TableShard> shards_;
  Values values_;
};

State state_of(const Leaves& leaves, const Values& values, const Values& rank_values) {
  State state;
  for (const auto& [name, shape, pieces, is_replicated, owner] : leaves.tensors) {
    PlacedTensor placed{name, shape, {}, is_replicated, owner};
    for (const auto& [offsets, tensor, rows] : pieces) {
      placed.pieces.push_back({offsets, tensor, rows.value_or(at::Tensor())});
    }
    state.add(std::move(placed));
  }
  for (const auto& [prefix, state_prefix, shards, numbers] : leaves.tables) {
    add_tables(state, std::make_shared<GivenTables>(shards, numbers), prefix, state_prefix);
  }
  for (const auto& [prefix, hook, rank, size] : leaves.hooks) {
    add_hook(state, hook, rank, size, prefix);
  }
  state.values = values;
  state.rank_values = rank_values;
  return state;
}

void translate_checkpoint_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const Error& error) {
    const py::object type = py::module_::import("tessera.checkpoint").attr("CheckpointError");
    PyErr_SetObject(type.ptr(), type(error.what(), name_of(error.kind())).ptr());
  }
}

void bind_reader(py::module_& m) {
  py::class_<Reader>(m, "CheckpointReader", "An open checkpoint; every read is checked.")
      .def(py::init([](const std::string& root, std::int64_t step) {
             auto reader = std::make_unique<Reader>(root, step);
             note_read(root);
             return reader;
           }),
           Release())
      .def_static(
          "newest",
          [](const std::string& root) {
            Found found = find_newest(root);
            if (found.reader) note_read(root);
            return std::pair(std::move(found.reader), std::move(found.warnings));
          },
          py::arg("root"), Release(),
          "The one committed last that opens, and why newer ones do not.")
      .def_property_readonly("step", [](const Reader& self) { return self.manifest().step; })
      .def_property_readonly("world", [](const Reader& self) { return self.manifest().world; })
      .def_property_readonly("plan", [](const Reader& self) { return self.manifest().plan; })
      .def_property_readonly("values", [](const Reader& self) { return self.manifest().values; })
      .def_property_readonly("rank_values",
                             [](const Reader& self) { return self.manifest().rank_values; })
      .def_property_readonly("folder", &Reader::folder)
      .def("names",
           [](const Reader& self) {
             std::vector<std::string> names;
             for (const TensorInfo& tensor : self.tensors()) names.push_back(tensor.name);
             return names;
           })
      .def(
          "read",
          [](const Reader& self, const std::string& name) {
            const TensorInfo* info = self.find(name);
            if (info == nullptr) self.read(name, {}, nullptr);  // throws
            return read_tensor(self, *info);
          },
          py::arg("name"), Release())
      .def(
          "verify", [](const Reader& self) { self.verify(); }, Release())
      .def(
          "export", [](const Reader& self, const std::string& path) { export_plain(self, path); },
          py::arg("path"), Release());
}

void bind_leaves(py::module_& m) {
  py::class_<TableShard>(m, "TableShard", "A box of a table on this rank.")
      .def(py::init([](std::string name, std::int64_t table_rows, std::int64_t table_columns,
                       std::int64_t row, std::int64_t column, at::Tensor weight,
                       std::map<std::string, at::Tensor> state, bool is_replicated,
                       const std::optional<at::Tensor>& touched_rows) {
             return TableShard{std::move(name),
                               table_rows,
                               table_columns,
                               row,
                               column,
                               std::move(weight),
                               std::move(state),
                               is_replicated,
                               touched_rows.value_or(at::Tensor())};
           }),
           py::arg("name"), py::arg("table_rows"), py::arg("table_columns"), py::arg("row"),
           py::arg("column"), py::arg("weight"),
           py::arg("state") = std::map<std::string, at::Tensor>(), py::arg("is_replicated") = false,
           py::arg("touched_rows") = py::none())
      .def_readonly("name", &TableShard::name)
      .def_readonly("weight", &TableShard::weight)
      .def_readonly("state", &TableShard::state);
  py::class_<Leaves>(m, "CheckpointLeaves")
      .def(py::init([](std::vector<PlacedTuple> tensors, std::vector<TablesTuple> tables,
                       std::vector<HookTuple> hooks) {
             return Leaves{std::move(tensors), std::move(tables), std::move(hooks)};
           }),
           py::arg("tensors"), py::arg("tables"), py::arg("hooks"));
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  py::register_local_exception_translator(translate_checkpoint_error);
  py::class_<SaveReport>(m, "SaveReport", "What a save has written.")
      .def_readonly("step", &SaveReport::step)
      .def_readonly("folder", &SaveReport::folder)
      .def_readonly("rank_bytes", &SaveReport::rank_bytes)
      .def_readonly("total_bytes", &SaveReport::total_bytes)
      .def_readonly("seconds", &SaveReport::seconds)
      .def("__repr__", [](const SaveReport& report) {
        return py::str(
                   "SaveReport(step={}, folder={!r}, rank_bytes={}, total_bytes={}, seconds={})")
            .format(report.step, report.folder, report.rank_bytes, report.total_bytes,
                    report.seconds);
      });
  py::class_<LoadReport>(m, "LoadReport", "Which checkpoint was loaded, and its values.")
      .def_readonly("step", &LoadReport::step)
      .def_readonly("folder", &LoadReport::folder)
      .def_readonly("saved_world", &LoadReport::saved_world)
      .def_readonly("values", &LoadReport::values)
      .def_readonly("rank_values", &LoadReport::rank_values)
      .def_readonly("warnings", &LoadReport::warnings)
      .def("__repr__", [](const LoadReport& report) {
        return py::str(
                   "LoadReport(step={}, folder={!r}, saved_world={}, values={}, rank_values={}, "
                   "warnings={})")
            .format(report.step, report.folder, report.saved_world, report.values,
                    report.rank_values, report.warnings);
      });
  options_class<SaveOptions>(m, "SaveOptions")
      .def_readwrite("keep", &SaveOptions::keep)
      .def_readwrite("replaces", &SaveOptions::replaces)
      .def_readwrite("plan", &SaveOptions::plan)
      .def_readwrite("base", &SaveOptions::base);
  bind_reader(m);
  bind_leaves(m);
  m.def(
      "checkpoint_save",
      [](const std::string& root, std::int64_t step, const Leaves& leaves, const Values& values,
         const Values& rank_values, const MaybeGroup& group, const SaveOptions& options) {
        return save(root, step, state_of(leaves, values, rank_values), maybe_group(group), options);
      },
      py::arg("root"), py::arg("step"), py::arg("leaves"), py::arg("values"),
      py::arg("rank_values"), py::arg("group"), py::arg("options"), Release());
  m.def(
      "checkpoint_load",
      [](const std::string& root, const Leaves& leaves, const MaybeGroup& group, MaybeStep step) {
        State state = state_of(leaves, {}, {});
        LoadOptions options;
        options.step = step;
        return load(root, state, maybe_group(group), options);
      },
      Release());
  m.def(
      "checkpoint_steps", [](const std::string& root) { return list_steps(root); }, py::arg("root"),
      Release());
  m.def(
      "checkpoint_import",
      [](const std::string& path, const std::string& root, std::int64_t step, bool replaces) {
        import_plain(path, root, step, Disk::real(), replaces);
      },
      Release());
  py::class_<AsyncSaver>(m, "AsyncSaver")
      .def(py::init([](const std::string& root, const MaybeGroup& group, SaveOptions options) {
             return std::make_unique<AsyncSaver>(root, maybe_group(group), std::move(options));
           }),
           py::arg("root"), py::arg("group"), py::arg("options"), Release())
      .def(
          "save",
          [](AsyncSaver& self, std::int64_t step, const Leaves& leaves, const Values& values,
             const Values& rank_values,
             MaybeStep base) { self.save(step, state_of(leaves, values, rank_values), base); },
          py::arg("step"), py::arg("leaves"), py::arg("values"), py::arg("rank_values"),
          py::arg("base"), Release())
      .def("check", &AsyncSaver::check, Release())
      .def("wait", &AsyncSaver::wait, Release())
      .def("is_saving", &AsyncSaver::is_saving, Release());
}

}  // namespace tessera::python
