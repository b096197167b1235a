#include <algorithm>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "bindings.h"
#include "option_fields.h"
#include "tessera/collision/id_table.h"
#include "tessera/collision/mch.h"
#include "tessera/collision/row_init.h"
#include "tessera/core/check.h"

namespace tessera::python {
namespace {

using at::Tensor;
using collision::Admission;
using collision::AdmissionKind;
using collision::Eviction;
using collision::EvictionKind;
using collision::IdChanges;
using collision::IdTable;
using collision::IdTableOptions;
using collision::MchIndex;
using collision::MchSlots;

Tensor ids_of(const Tensor& values) { return values.to(at::kCPU, at::kLong).contiguous(); }

std::span<const std::int64_t> ids_in(const Tensor& values) {
  return {values.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(values.numel())};
}

template <typename Number>
Tensor list_tensor(const std::vector<Number>& values, at::ScalarType type) {
  Tensor tensor = at::empty({static_cast<std::int64_t>(values.size())}, type);
  std::copy(values.begin(), values.end(), tensor.data_ptr<Number>());
  return tensor;
}
Tensor numbers_of(const std::vector<std::int64_t>& values) {
  return list_tensor(values, at::kLong);
}

template <typename Function>
Tensor mapped(const Tensor& values, const Function& function) {
  const Tensor ids = ids_of(values);
  Tensor results = at::empty_like(ids);
  auto* to = results.data_ptr<std::int64_t>();
  for (const std::int64_t id : ids_in(ids)) *to++ = static_cast<std::int64_t>(function(id));
  return results;
}

using ChangesOf = std::tuple<Tensor, Tensor, Tensor, Tensor, std::int64_t>;
ChangesOf changes_of(const IdChanges& changes) {
  return {numbers_of(changes.new_ids), numbers_of(changes.new_rows),
          numbers_of(changes.evicted_ids), numbers_of(changes.evicted_rows), changes.num_refused};
}

void bind_id_options(py::module_& module) {
  py::enum_<AdmissionKind>(module, "AdmissionKind")
      .value("ALWAYS", AdmissionKind::kAlways)
      .value("FREQUENCY", AdmissionKind::kFrequency)
      .value("PROBABILITY", AdmissionKind::kProbability);
  py::enum_<EvictionKind>(module, "EvictionKind")
      .value("NONE", EvictionKind::kNone)
      .value("LFU", EvictionKind::kLfu)
      .value("LRU", EvictionKind::kLru)
      .value("DISTANCE_LFU", EvictionKind::kDistanceLfu)
      .value("TIME_TO_LIVE", EvictionKind::kTimeToLive);
  options_class<Admission>(module, "Admission")
      .def_readwrite("kind", &Admission::kind)
      .def_readwrite("sightings", &Admission::sightings)
      .def_readwrite("probability", &Admission::probability)
      .def_readwrite("seed", &Admission::seed);
  options_class<Eviction>(module, "Eviction")
      .def_readwrite("kind", &Eviction::kind)
      .def_readwrite("decay_exponent", &Eviction::decay_exponent)
      .def_readwrite("time_to_live", &Eviction::time_to_live)
      .def_readwrite("interval", &Eviction::interval)
      .def_readwrite("share", &Eviction::share);
  options_class<IdTableOptions>(module, "IdTableOptions")
      .def_readwrite("name", &IdTableOptions::name)
      .def_readwrite("capacity", &IdTableOptions::capacity)
      .def_readwrite("admission", &IdTableOptions::admission)
      .def_readwrite("eviction", &IdTableOptions::eviction)
      .def_readwrite("refuse_when_full", &IdTableOptions::refuse_when_full)
      .def_readwrite("protect", &IdTableOptions::protect)
      .def_readwrite("first_bucket", &IdTableOptions::first_bucket)
      .def_readwrite("end_bucket", &IdTableOptions::end_bucket)
      .def_readwrite("most_bytes", &IdTableOptions::most_bytes);
}

/// Rows as tensors number them: from `first_row` on, with the row before for ids without one.
void number_from(std::int64_t first_row, std::span<std::int64_t> rows) {
  for (std::int64_t& row : rows) row += first_row;
}

Tensor find_rows(const IdTable& table, const Tensor& values, std::int64_t first_row) {
  const Tensor ids = ids_of(values);
  const auto from = ids_in(ids);
  Tensor rows = at::empty_like(ids);
  const std::span<std::int64_t> to(rows.data_ptr<std::int64_t>(), from.size());
  // Pieces whose rows are still near when they are numbered.
  constexpr std::int64_t kPiece = 8192;
  at::parallel_for(0, rows.numel(), 16384, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin; at < end; at += kPiece) {
      const auto first = static_cast<std::size_t>(at);
      const auto count = static_cast<std::size_t>(std::min(kPiece, end - at));
      table.find(from.subspan(first, count), to.subspan(first, count));
      number_from(first_row, to.subspan(first, count));
    }
  });
  return rows;
}

/// What `call` makes of the ids: their rows, and what it changed.
template <IdChanges (IdTable::*call)(std::span<const std::int64_t>, std::span<const std::int64_t>,
                                     std::int64_t, std::span<std::int64_t>)>
std::pair<Tensor, ChangesOf> admitted(IdTable& self, const Tensor& values,
                                      const std::optional<Tensor>& counts, std::int64_t step,
                                      std::int64_t first_row) {
  const Tensor ids = ids_of(values);
  const Tensor seen = counts ? ids_of(*counts) : at::empty({0}, at::kLong);
  Tensor rows = at::empty_like(ids);
  const std::span<std::int64_t> to(rows.data_ptr<std::int64_t>(), ids_in(ids).size());
  const IdChanges changes = (self.*call)(ids_in(ids), ids_in(seen), step, to);
  number_from(first_row, to);
  return {rows, changes_of(changes)};
}

void bind_id_table(py::module_& module) {
  py::class_<IdTable>(module, "IdTable")
      .def(py::init<IdTableOptions>())
      .def("find", &find_rows, py::arg("values"), py::arg("first_row") = 0, Release())
      .def("admit", &admitted<&IdTable::admit>, py::arg("values"), py::arg("counts"),
           py::arg("step"), py::arg("first_row") = 0, Release())
      .def("plan_admit", &admitted<&IdTable::plan_admit>, py::arg("values"), py::arg("counts"),
           py::arg("step"), py::arg("first_row") = 0, Release())
      .def("keep_admitted", &IdTable::keep_admitted)
      .def("undo_admitted", &IdTable::undo_admitted)
      .def("erase",
           [](IdTable& self, const Tensor& values) {
             return changes_of(self.erase(ids_in(ids_of(values))));
           })
      .def("clear", &IdTable::clear)
      .def(
          "load",
          [](IdTable& self, const Tensor& ids, const Tensor& counts, const Tensor& last_steps) {
            self.load(ids_in(ids_of(ids)), ids_in(ids_of(counts)), ids_in(ids_of(last_steps)));
          },
          Release())
      .def("export_ids",
           [](const IdTable& self) {
             const collision::IdList list = self.export_ids();
             return std::tuple(numbers_of(list.ids), numbers_of(list.rows), numbers_of(list.counts),
                               numbers_of(list.last_steps));
           })
      .def("export_sketch",
           [](const IdTable& self) {
             const collision::IdSketch sketch = self.export_sketch();
             return std::tuple(numbers_of(sketch.buckets), list_tensor(sketch.counters, at::kByte),
                               numbers_of(sketch.sightings));
           })
      .def("load_sketch",
           [](IdTable& self, const Tensor& buckets, const Tensor& counters,
              const Tensor& sightings) {
             const Tensor own = counters.to(at::kCPU, at::kByte).contiguous();
             const auto* bytes = own.const_data_ptr<std::uint8_t>();
             const Tensor numbers = ids_of(buckets);
             const Tensor sums = ids_of(sightings);
             self.load_sketch({{ids_in(numbers).begin(), ids_in(numbers).end()},
                               {bytes, bytes + own.numel()},
                               {ids_in(sums).begin(), ids_in(sums).end()}});
           })
      .def("__len__", &IdTable::size)
      .def("num_rows", &IdTable::num_rows)
      .def("has_row", &IdTable::has_row)
      .def("id_of", &IdTable::id_of)
      .def("count_of", &IdTable::count_of)
      .def("last_step_of", &IdTable::last_step_of)
      .def("bytes", &IdTable::bytes)
      .def("huge_page_bytes", &IdTable::huge_page_bytes)
      .def("num_segments", &IdTable::num_segments);
  module.def("id_hash", &collision::id_hash);
  module.def("id_of_hash", &collision::id_of_hash);
  module.def("bucket_of", &collision::bucket_of);
  module.def("buckets_of", [](const Tensor& values) {
    return mapped(values, [](std::int64_t id) { return collision::bucket_of(id); });
  });
  module.def("hash_ids", [](const Tensor& values) {
    return mapped(values, [](std::int64_t id) { return collision::id_hash(id) >> 1; });
  });
  module.def(
      "init_rows",
      [](const Tensor& values, std::uint64_t seed, std::int64_t columns, double low, double high) {
        const Tensor ids = ids_of(values);
        Tensor rows = at::empty({ids.numel(), columns}, at::kFloat);
        collision::init_rows(ids_in(ids), seed, columns, static_cast<float>(low),
                             static_cast<float>(high),
                             {rows.data_ptr<float>(), static_cast<std::size_t>(rows.numel())});
        return rows;
      },
      py::arg("values"), py::arg("seed"), py::arg("columns"), py::arg("low"), py::arg("high"),
      Release());
}

void bind_mch(py::module_& module) {
  module.def("mch_match", &collision::mch_match, Release());
  module.def("mch_select", &collision::mch_select, Release());
  py::class_<MchIndex>(module, "MchIndex")
      .def(py::init<>())
      .def(
          "rebuild",
          [](MchIndex& self, const Tensor& ids, const Tensor& rows, std::int64_t num_ids) {
            self.rebuild({ids, rows, {}}, num_ids);
          },
          Release())
      .def(
          "replace",
          [](MchIndex& self, const Tensor& ids, const Tensor& rows,
             const std::vector<Tensor>& metadata, std::int64_t num_ids, const Tensor& places,
             const Tensor& new_ids) {
            MchSlots slots{ids, rows, metadata};
            return self.replace(slots, num_ids, places, new_ids);
          },
          py::arg("ids"), py::arg("rows"), py::arg("metadata"), py::arg("num_ids"),
          py::arg("places"), py::arg("new_ids"), Release())
      .def("remap", &MchIndex::remap, Release());
}

void translate_id_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const collision::IdMemoryError& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const collision::IdListError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  }
}

}  // namespace

void bind_collision(py::module_& parent) {
  auto module = parent.def_submodule("collision", "Any 64-bit id onto a row.");
  py::register_local_exception<collision::IdTableError>(module, "IdTableError", PyExc_RuntimeError);
  py::register_local_exception<collision::IdTableFull>(module, "IdTableFull",
                                                       module.attr("IdTableError"));
  py::register_local_exception<collision::TooManyRows>(module, "TooManyRows",
                                                       module.attr("IdTableError"));
  // Registered last, so asked first.
  py::register_local_exception_translator(translate_id_error);
  module.attr("NUM_BUCKETS") = collision::kNumBuckets;
  module.attr("ID_HASH") = std::string(collision::kIdHashName);
  bind_id_options(module);
  bind_id_table(module);
  bind_mch(module);
}

}  // namespace tessera::python
