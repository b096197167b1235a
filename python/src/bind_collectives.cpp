#include <pybind11/stl.h>

#include "arguments.h"
#include "bindings.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/leader.h"

namespace tessera::python {
namespace {

using comm::Reduction;
using ReduceOp = c10d::ReduceOp::RedOpType;

Reduction reduction_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::SUM:
      return Reduction::kSum;
    case ReduceOp::AVG:
      return Reduction::kAvg;
    case ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case ReduceOp::MIN:
      return Reduction::kMin;
    case ReduceOp::MAX:
      return Reduction::kMax;
    case ReduceOp::BAND:
      return Reduction::kBand;
    case ReduceOp::BOR:
      return Reduction::kBor;
    case ReduceOp::BXOR:
      return Reduction::kBxor;
    default:
      throw py::value_error(
          "comm: this reduction is not known here. Use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or "
          "BXOR.");
  }
}

}  // namespace
}  // namespace tessera::python

/// Reductions as torch has them.
template <>
struct pybind11::detail::type_caster<tessera::comm::Reduction> {
  PYBIND11_TYPE_CASTER(tessera::comm::Reduction, const_name("RedOpType"));

  bool load(handle source, bool convert) {
    make_caster<tessera::python::ReduceOp> op;
    if (!op.load(source, convert)) return false;
    value = tessera::python::reduction_of(cast_op<tessera::python::ReduceOp>(op));
    return true;
  }
};

namespace tessera::python {
namespace {

using comm::Group;
using Pending = comm::Awaitable<at::Tensor>;
using at::Tensor;

// Every collective in its two forms, under the names of collectives.h.
void bind_reductions(py::module_& m) {
  m.def("all_reduce", &comm::all_reduce, py::arg("input"), py::arg("group"), py::arg("op"),
        Release());
  m.def("all_reduce_async", &comm::all_reduce_async, py::arg("input"), py::arg("group"),
        py::arg("op"), Release());
  m.def("reduce_scatter", &comm::reduce_scatter, py::arg("input"), py::arg("group"), py::arg("op"),
        Release());
  m.def("reduce_scatter_async", &comm::reduce_scatter_async, py::arg("input"), py::arg("group"),
        py::arg("op"), Release());
  m.def("reduce", &comm::reduce, py::arg("input"), py::arg("root"), py::arg("group"), py::arg("op"),
        Release());
  m.def("reduce_scatter_v", &comm::reduce_scatter_v, py::arg("input"), py::arg("rows"),
        py::arg("group"), py::arg("op"), Release());
  m.def("reduce_scatter_v_async", &comm::reduce_scatter_v_async, py::arg("input"), py::arg("rows"),
        py::arg("group"), py::arg("op"), Release());
  m.def(
      "all_reduce_",
      [](Tensor tensor, const Group& group, Reduction op) {
        comm::all_reduce_(tensor, group, op);
        return tensor;
      },
      py::arg("tensor"), py::arg("group"), py::arg("op"), Release());
}

void bind_exchanges(py::module_& m) {
  m.def("all_gather", &comm::all_gather, py::arg("input"), py::arg("group"), Release());
  m.def("all_gather_async", &comm::all_gather_async, py::arg("input"), py::arg("group"), Release());
  m.def("all_to_all", &comm::all_to_all, py::arg("input"), py::arg("group"), Release());
  m.def("all_to_all_async", &comm::all_to_all_async, py::arg("input"), py::arg("group"), Release());
  m.def("all_gather_v", &comm::all_gather_v, py::arg("input"), py::arg("group"), py::arg("rows"),
        Release());
  m.def("all_gather_v_async", &comm::all_gather_v_async, py::arg("input"), py::arg("group"),
        py::arg("rows"), Release());
  m.def("all_to_all_v", &comm::all_to_all_v, py::arg("input"), py::arg("send_rows"),
        py::arg("group"), py::arg("recv_rows"), Release());
  m.def("all_to_all_v_async", &comm::all_to_all_v_async, py::arg("input"), py::arg("send_rows"),
        py::arg("group"), py::arg("recv_rows"), Release());
}

void bind_rooted(py::module_& m) {
  m.def(
      "broadcast_",
      [](Tensor tensor, int root, const Group& group) {
        comm::broadcast_(tensor, root, group);
        return tensor;
      },
      py::arg("tensor"), py::arg("root"), py::arg("group"), Release());
  m.def("gather", &comm::gather, py::arg("input"), py::arg("root"), py::arg("group"),
        py::arg("rows"), Release());
  m.def("scatter", &comm::scatter, py::arg("input"), py::arg("rows"), py::arg("root"),
        py::arg("group"), Release());
  m.def("barrier", &comm::barrier, py::arg("group"), Release());
  m.def(
      "broadcast_bytes",
      [](const py::bytes& bytes, int root, const Group& group) {
        const std::string_view text = bytes;
        std::vector<std::uint8_t> all;
        {
          py::gil_scoped_release release;
          all = comm::invoke_on_rank_and_broadcast_bytes(
              group, root, [&text] { return std::vector<std::uint8_t>(text.begin(), text.end()); });
        }
        return py::bytes(reinterpret_cast<const char*>(all.data()), all.size());
      },
      py::arg("bytes"), py::arg("root"), py::arg("group"),
      "Return rank `root`'s bytes on every rank. Collective.");
}

}  // namespace

void bind_collectives(py::module_& module) {
  py::class_<Pending>(module, "Pending", "A tensor that is on its way.")
      .def(
          "wait", [](const Pending& self) { return self.wait(); }, Release(),
          "Return the tensor, waiting for it the first time.");
  bind_reductions(module);
  bind_exchanges(module);
  bind_rooted(module);
}

}  // namespace tessera::python
