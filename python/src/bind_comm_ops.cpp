#include <pybind11/stl.h>

#include "arguments.h"
#include "bindings.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Codecs;
using comm::Group;
using sharding::Sizes;

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

void bind_planned(py::module_& module) {
  using sharding::PlannedExchange;
  namespace planned = sharding::planned;
  py::class_<PlannedExchange>(module, "PlannedExchange")
      .def("run", &PlannedExchange::run, py::arg("input"), Release())
      .def("start", &PlannedExchange::start, py::arg("input"), Release())
      .def("wait", &PlannedExchange::wait, Release())
      .def("start_backward", &PlannedExchange::start_backward, py::arg("gradient"), Release())
      .def("wait_backward", &PlannedExchange::wait_backward, Release());
  module.def("alltoall_pooled", &planned::alltoall_pooled, py::arg("pooled"),
             py::arg("batch_size_per_rank"), py::arg("dim_sum_per_rank"), py::arg("group"),
             py::arg("codecs"), Release());
  module.def("variable_batch_alltoall_pooled", &planned::variable_batch_alltoall_pooled,
             py::arg("pooled"), py::arg("batch_size_per_rank_per_feature"),
             py::arg("batch_size_per_feature_pre_a2a"), py::arg("emb_dim_per_rank_per_feature"),
             py::arg("group"), py::arg("codecs"), Release());
  module.def(
      "alltoall_sequence",
      [](const Tensor& embeddings, const MaybeTensor& forward_recat,
         const MaybeTensor& backward_recat, const Tensor& lengths, const Sizes& sent,
         const Sizes& received, const Group& group, const Codecs& codecs) {
        return planned::alltoall_sequence(embeddings, tensor_of(forward_recat),
                                          tensor_of(backward_recat), lengths, sent, received, group,
                                          codecs);
      },
      py::arg("embeddings"), py::arg("forward_recat"), py::arg("backward_recat"),
      py::arg("lengths"), py::arg("input_splits"), py::arg("output_splits"), py::arg("group"),
      py::arg("codecs"), Release());
  module.def("alltoallv", &planned::alltoallv, py::arg("columns"), py::arg("out_split"),
             py::arg("group"), py::arg("codecs"), Release());
  module.def("reduce_scatter_pooled", &planned::reduce_scatter_pooled, py::arg("shapes"),
             py::arg("group"), py::arg("codecs"), Release());
  module.def("reduce_scatter_base_pooled", &planned::reduce_scatter_base_pooled, py::arg("input"),
             py::arg("group"), py::arg("codecs"), Release());
  module.def("reduce_scatter_v_pooled", &planned::reduce_scatter_v_pooled, py::arg("input"),
             py::arg("input_splits"), py::arg("group"), py::arg("codecs"), Release());
  module.def("reduce_scatter_v_per_feature_pooled", &planned::reduce_scatter_v_per_feature_pooled,
             py::arg("input"), py::arg("batch_size_per_rank_per_feature"),
             py::arg("embedding_dims"), py::arg("group"), py::arg("codecs"), Release());
  module.def("all_gather_base_pooled", &planned::all_gather_base_pooled, py::arg("input"),
             py::arg("group"), py::arg("codecs"), Release());
}

}  // namespace

void bind_comm_ops(py::module_& module) {
  py::module_ sub = module.def_submodule("comm_ops", "Exchanges between tables, differentiable.");
  bind_codecs(sub);
  bind_planned(sub);
  sub.def("set_gradient_division", &sharding::set_gradient_division, py::arg("is_on"));
  sub.def("get_gradient_division", &sharding::get_gradient_division);
}

}  // namespace tessera::python
