#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Codecs;
using comm::Group;
using sharding::Sizes;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Release = py::call_guard<py::gil_scoped_release>;

void bind_codecs(py::module_& module) {
  py::enum_<comm::WireFormat>(module, "WireFormat")
      .value("NONE", comm::WireFormat::kNone)
      .value("FP16", comm::WireFormat::kFp16)
      .value("BF16", comm::WireFormat::kBf16)
      .value("INT8", comm::WireFormat::kInt8)
      .value("FP8", comm::WireFormat::kFp8);
  py::class_<comm::Codec>(module, "Codec")
      .def(py::init([](comm::WireFormat format, double loss_scale, std::int64_t row_size) {
             return comm::Codec({.format = format, .loss_scale = loss_scale, .row_size = row_size});
           }),
           py::arg("format"), py::arg("loss_scale"), py::arg("row_size"))
      .def("wire_size", &comm::Codec::wire_size, py::arg("count"))
      .def("encode", &comm::Codec::encode, py::arg("values"), py::arg("parts"), Release())
      .def("decode", &comm::Codec::decode, py::arg("wire"), py::arg("parts"), py::arg("dtype"),
           Release());
  py::class_<Codecs>(module, "Codecs")
      .def(py::init<comm::Codec, comm::Codec>(), py::arg("forward"), py::arg("backward"));
}

}  // namespace

void bind_comm_ops(py::module_& module) {
  py::module_ sub = module.def_submodule("comm_ops", "Exchanges between tables, differentiable.");
  bind_codecs(sub);
  py::class_<sharding::ListRequest>(sub, "PendingList")
      .def("wait", [](const sharding::ListRequest& self) { return self.wait(); }, Release());
  sub.def("set_gradient_division", &sharding::set_gradient_division, py::arg("is_on"));
  sub.def("get_gradient_division", &sharding::get_gradient_division);
  sub.def(
      "alltoall_pooled",
      [](const Tensor& pooled, const Sizes& batches, const Sizes& dims, const ProcessGroup& group,
         const Codecs& codecs) {
        return sharding::alltoall_pooled(pooled, batches, dims, Group(group), codecs);
      },
      Release());
  sub.def(
      "variable_batch_alltoall_pooled",
      [](const Tensor& pooled, const std::vector<Sizes>& batches, const Sizes& own_batches,
         const std::vector<Sizes>& dims, const ProcessGroup& group, const Codecs& codecs) {
        return sharding::variable_batch_alltoall_pooled(pooled, batches, own_batches, dims,
                                                        Group(group), codecs);
      },
      Release());
  sub.def(
      "alltoall_sequence",
      [](const Tensor& embeddings, const std::optional<Tensor>& forward_recat,
         const std::optional<Tensor>& backward_recat, const Tensor& lengths, const Sizes& sent,
         const Sizes& received, const ProcessGroup& group, const Codecs& codecs) {
        return sharding::alltoall_sequence(embeddings, forward_recat.value_or(Tensor()),
                                           backward_recat.value_or(Tensor()), lengths, sent,
                                           received, Group(group), codecs);
      },
      Release());
  sub.def(
      "alltoallv",
      [](const std::vector<Tensor>& inputs, const Sizes& out_split, const ProcessGroup& group,
         const Codecs& codecs) {
        return sharding::alltoallv(inputs, out_split, Group(group), codecs);
      },
      Release());
  sub.def(
      "reduce_scatter_pooled",
      [](const std::vector<Tensor>& inputs, const ProcessGroup& group, const Codecs& codecs) {
        return sharding::reduce_scatter_pooled(inputs, Group(group), codecs);
      },
      Release());
  sub.def(
      "reduce_scatter_base_pooled",
      [](const Tensor& input, const ProcessGroup& group, const Codecs& codecs) {
        return sharding::reduce_scatter_base_pooled(input, Group(group), codecs);
      },
      Release());
  sub.def(
      "reduce_scatter_v_pooled",
      [](const Tensor& input, const Sizes& splits, const ProcessGroup& group,
         const Codecs& codecs) {
        return sharding::reduce_scatter_v_pooled(input, splits, Group(group), codecs);
      },
      Release());
  sub.def(
      "reduce_scatter_v_per_feature_pooled",
      [](const Tensor& input, const std::vector<Sizes>& batches, const Sizes& dims,
         const ProcessGroup& group, const Codecs& codecs) {
        return sharding::reduce_scatter_v_per_feature_pooled(input, batches, dims, Group(group),
                                                             codecs);
      },
      Release());
  sub.def(
      "all_gather_base_pooled",
      [](const Tensor& input, const ProcessGroup& group, const Codecs& codecs) {
        return sharding::all_gather_base_pooled(input, Group(group), codecs);
      },
      Release());
}

}  // namespace tessera::python
