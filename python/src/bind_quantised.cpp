#include "arguments.h"
#include "bindings.h"
#include "tessera/core/check.h"
#include "tessera/embedding/quantised_tables.h"

namespace tessera::python {
namespace {

using embedding::PoolingType;
using embedding::QuantisedTables;
using embedding::QuantisedTableSpec;

embedding::RowType type_of(const std::string& name) {
  const auto type = embedding::row_type_of(name);
  TESSERA_CHECK_VALUE(type, "embed.quantised: there is no row type '", name,
                      "'; fp32, fp16, bf16, fp8, int8, int4 and int2 are known.");
  return *type;
}

}  // namespace

void bind_quantised(py::module_& module) {
  auto embedding_module = module.attr("embedding").cast<py::module_>();
  embedding_module.def(
      "quantised_row_bytes",
      [](const std::string& type, std::int64_t dim, std::int64_t alignment) {
        return embedding::row_bytes(type_of(type), dim, alignment);
      },
      py::arg("type"), py::arg("dim"), py::arg("alignment") = 1);
  py::class_<QuantisedTables, std::shared_ptr<QuantisedTables>>(embedding_module, "QuantisedTables")
      .def(py::init([](const std::vector<std::tuple<std::string, std::int64_t, std::int64_t,
                                                    std::string, std::vector<std::string>>>& specs,
                       PoolingType pooling, std::int64_t alignment, at::Device device) {
             std::vector<QuantisedTableSpec> tables;
             for (const auto& [name, rows, dim, type, features] : specs) {
               tables.push_back({name, rows, dim, type_of(type), features});
             }
             return std::make_shared<QuantisedTables>(std::move(tables), pooling, alignment,
                                                      device);
           }),
           py::arg("tables"), py::arg("pooling"), py::arg("alignment") = 16,
           py::arg("device") = at::Device(at::kCPU))
      .def("rows", &QuantisedTables::rows, py::arg("table"))
      .def("assign", &QuantisedTables::assign, py::arg("table"), py::arg("numbers"), Release())
      .def("dequantised", &QuantisedTables::dequantised, py::arg("table"), Release())
      .def("forward", &QuantisedTables::forward, py::arg("ids"), py::arg("offsets"),
           py::arg("weights") = std::nullopt, Release());
}

}  // namespace tessera::python
