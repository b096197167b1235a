#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/leader.h"

namespace tessera::python {
namespace {

using comm::Group;
using comm::Reduction;
using Pending = comm::Awaitable<at::Tensor>;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Release = py::call_guard<py::gil_scoped_release>;
using ReduceOp = c10d::ReduceOp::RedOpType;
using Rows = std::vector<std::int64_t>;
using MaybeRows = std::optional<Rows>;
using at::Tensor;

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

// Every collective in its two forms, under the names of collectives.h.
void bind_reductions(py::module_& m) {
  m.def(
      "all_reduce",
      [](const Tensor& input, const ProcessGroup& group, ReduceOp op) {
        return comm::all_reduce(input, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "all_reduce_async",
      [](const Tensor& input, const ProcessGroup& group, ReduceOp op) {
        return comm::all_reduce_async(input, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "all_reduce_",
      [](Tensor tensor, const ProcessGroup& group, ReduceOp op) {
        comm::all_reduce_(tensor, Group(group), reduction_of(op));
        return tensor;
      },
      py::arg("tensor"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "reduce",
      [](const Tensor& input, int root, const ProcessGroup& group, ReduceOp op) {
        return comm::reduce(input, root, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("root"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "reduce_scatter",
      [](const Tensor& input, const ProcessGroup& group, ReduceOp op) {
        return comm::reduce_scatter(input, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "reduce_scatter_async",
      [](const Tensor& input, const ProcessGroup& group, ReduceOp op) {
        return comm::reduce_scatter_async(input, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "reduce_scatter_v",
      [](const Tensor& input, const Rows& rows, const ProcessGroup& group, ReduceOp op) {
        return comm::reduce_scatter_v(input, rows, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("rows"), py::arg("group"), py::arg("op"), Release());
  m.def(
      "reduce_scatter_v_async",
      [](const Tensor& input, const Rows& rows, const ProcessGroup& group, ReduceOp op) {
        return comm::reduce_scatter_v_async(input, rows, Group(group), reduction_of(op));
      },
      py::arg("input"), py::arg("rows"), py::arg("group"), py::arg("op"), Release());
}

void bind_exchanges(py::module_& m) {
  m.def(
      "all_gather",
      [](const Tensor& input, const ProcessGroup& group) {
        return comm::all_gather(input, Group(group));
      },
      py::arg("input"), py::arg("group"), Release());
  m.def(
      "all_gather_async",
      [](const Tensor& input, const ProcessGroup& group) {
        return comm::all_gather_async(input, Group(group));
      },
      py::arg("input"), py::arg("group"), Release());
  m.def(
      "all_gather_v",
      [](const Tensor& input, const ProcessGroup& group, const MaybeRows& rows) {
        return comm::all_gather_v(input, Group(group), rows);
      },
      py::arg("input"), py::arg("group"), py::arg("rows"), Release());
  m.def(
      "all_gather_v_async",
      [](const Tensor& input, const ProcessGroup& group, const MaybeRows& rows) {
        return comm::all_gather_v_async(input, Group(group), rows);
      },
      py::arg("input"), py::arg("group"), py::arg("rows"), Release());
  m.def(
      "all_to_all",
      [](const Tensor& input, const ProcessGroup& group) {
        return comm::all_to_all(input, Group(group));
      },
      py::arg("input"), py::arg("group"), Release());
  m.def(
      "all_to_all_async",
      [](const Tensor& input, const ProcessGroup& group) {
        return comm::all_to_all_async(input, Group(group));
      },
      py::arg("input"), py::arg("group"), Release());
  m.def(
      "all_to_all_v",
      [](const Tensor& input, const Rows& send_rows, const ProcessGroup& group,
         const MaybeRows& recv_rows) {
        return comm::all_to_all_v(input, send_rows, Group(group), recv_rows);
      },
      py::arg("input"), py::arg("send_rows"), py::arg("group"), py::arg("recv_rows"), Release());
  m.def(
      "all_to_all_v_async",
      [](const Tensor& input, const Rows& send_rows, const ProcessGroup& group,
         const MaybeRows& recv_rows) {
        return comm::all_to_all_v_async(input, send_rows, Group(group), recv_rows);
      },
      py::arg("input"), py::arg("send_rows"), py::arg("group"), py::arg("recv_rows"), Release());
}

void bind_rooted(py::module_& m) {
  m.def(
      "broadcast_",
      [](Tensor tensor, int root, const ProcessGroup& group) {
        comm::broadcast_(tensor, root, Group(group));
        return tensor;
      },
      py::arg("tensor"), py::arg("root"), py::arg("group"), Release());
  m.def(
      "gather",
      [](const Tensor& input, int root, const ProcessGroup& group, const MaybeRows& rows) {
        return comm::gather(input, root, Group(group), rows);
      },
      py::arg("input"), py::arg("root"), py::arg("group"), py::arg("rows"), Release());
  m.def(
      "scatter",
      [](const Tensor& input, const Rows& rows, int root, const ProcessGroup& group) {
        return comm::scatter(input, rows, root, Group(group));
      },
      py::arg("input"), py::arg("rows"), py::arg("root"), py::arg("group"), Release());
  m.def(
      "barrier", [](const ProcessGroup& group) { comm::barrier(Group(group)); }, py::arg("group"),
      Release());
  m.def(
      "broadcast_bytes",
      [](const py::bytes& bytes, int root, const ProcessGroup& group) {
        const std::string_view text = bytes;
        std::vector<std::uint8_t> all;
        {
          py::gil_scoped_release release;
          all = comm::invoke_on_rank_and_broadcast_bytes(Group(group), root, [&text] {
            return std::vector<std::uint8_t>(text.begin(), text.end());
          });
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
