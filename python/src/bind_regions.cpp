#include <pybind11/stl.h>

#include "arguments.h"
#include "bindings.h"
#include "tessera/regions/regions.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Group;
using MaybeSizes = std::optional<regions::Sizes>;

using OnWhole = Tensor (*)(const Tensor&, const Group&);
using OnSlices = Tensor (*)(const Tensor&, const Group&, std::int64_t, const MaybeSizes&);

void define(py::module_& module, const char* name, OnWhole apply) {
  module.def(name, apply, py::arg("x"), py::arg("group"), Release());
}

void define(py::module_& module, const char* name, OnSlices apply) {
  module.def(name, apply, py::arg("x"), py::arg("group"), py::arg("dim"), py::arg("sizes"),
             Release());
}

}  // namespace

void bind_regions(py::module_& module) {
  py::module_ sub = module.def_submodule("regions", "Differentiable operators between placements.");
  define(sub, "copy", &regions::copy);
  define(sub, "reduce", &regions::reduce);
  define(sub, "all_reduce", &regions::all_reduce);
  define(sub, "gather", &regions::gather);
  define(sub, "scatter", &regions::scatter);
  define(sub, "gather_shared", &regions::gather_shared);
  define(sub, "reduce_scatter", &regions::reduce_scatter);
  sub.def("even_sizes", &regions::even_sizes, py::arg("extent"), py::arg("num_parts"));
}

}  // namespace tessera::python
