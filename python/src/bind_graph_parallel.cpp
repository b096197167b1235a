#include <pybind11/stl.h>

#include "arguments.h"
#include "bindings.h"
#include "tessera/graph_parallel/gp_group.h"
#include "tessera/graph_parallel/halo.h"
#include "tessera/graph_parallel/neighbour_sum.h"
#include "tessera/graph_parallel/tensor_parts.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Group;
using graph_parallel::Adjacency;
using graph_parallel::HaloPlan;
using graph_parallel::Partition;
using graph_parallel::PendingRows;
using graph_parallel::SpatialOptions;
using Spatial = Partition (*)(const Tensor&, int, const SpatialOptions&);

template <Spatial make>
Partition spatial(const Tensor& positions, int num_parts, const MaybeTensor& cell,
                  std::array<bool, 3> is_periodic, const MaybeTensor& weights) {
  return make(positions, num_parts,
              {.cell = tensor_of(cell), .is_periodic = is_periodic, .weights = tensor_of(weights)});
}

void bind_partition(py::module_& module) {
  py::class_<Partition>(module, "Partition")
      .def_static("contiguous", py::overload_cast<std::int64_t, int>(&Partition::contiguous))
      .def_static("contiguous_sizes",
                  py::overload_cast<const std::vector<std::int64_t>&>(&Partition::contiguous))
      .def_static("from_owners", &Partition::from_owners)
      .def_static("morton", &spatial<&Partition::morton>, py::arg("positions"),
                  py::arg("num_parts"), py::arg("cell"), py::arg("is_periodic"), py::arg("weights"),
                  Release())
      .def_static("hilbert", &spatial<&Partition::hilbert>, py::arg("positions"),
                  py::arg("num_parts"), py::arg("cell"), py::arg("is_periodic"), py::arg("weights"),
                  Release())
      .def_static("recursive_bisection", &spatial<&Partition::recursive_bisection>,
                  py::arg("positions"), py::arg("num_parts"), py::arg("cell"),
                  py::arg("is_periodic"), py::arg("weights"), Release())
      .def_static(
          "metis",
          [](std::int64_t num_nodes, const Tensor& edge_index, int num_parts,
             const MaybeTensor& weights) {
            return Partition::metis(num_nodes, edge_index, num_parts, tensor_of(weights));
          },
          Release())
      .def_static("has_metis", &Partition::has_metis)
      .def_property_readonly("num_nodes", &Partition::num_nodes)
      .def_property_readonly("num_parts", &Partition::num_parts)
      .def_property_readonly("is_contiguous", &Partition::is_contiguous)
      .def_property_readonly("sizes", &Partition::sizes)
      .def_property_readonly("offsets", &Partition::offsets)
      .def_property_readonly("owners", &Partition::owners)
      .def_property_readonly("permutation", &Partition::permutation)
      .def_property_readonly("inverse", &Partition::inverse)
      .def("nodes_of", &Partition::nodes_of)
      .def("owner_of", &Partition::owner_of)
      .def("__repr__",
           [](const Partition& self) { return "<Partition: " + self.describe() + ">"; });
}

void bind_halo(py::module_& module) {
  py::class_<HaloPlan>(module, "HaloPlan")
      .def(py::init([](const Partition& partition, const Tensor& edge_index, const Group& group,
                       bool is_symmetric, bool check, std::optional<at::ScalarType> payload,
                       bool deterministic) {
             return HaloPlan(partition, edge_index, group,
                             {.is_symmetric = is_symmetric,
                              .check = check,
                              .payload = payload,
                              .deterministic = deterministic});
           }),
           py::arg("partition"), py::arg("edge_index"), py::arg("group"), py::arg("is_symmetric"),
           py::arg("check"), py::arg("payload"), py::arg("deterministic"), Release())
      .def_property_readonly("partition", &HaloPlan::partition)
      .def_property_readonly("num_owned", &HaloPlan::num_owned)
      .def_property_readonly("num_halo", &HaloPlan::num_halo)
      .def_property_readonly("num_local", &HaloPlan::num_local)
      .def_property_readonly("num_sent", &HaloPlan::num_sent)
      .def_property_readonly("nodes", &HaloPlan::nodes)
      .def_property_readonly("halo_nodes", &HaloPlan::halo_nodes)
      .def_property_readonly("send_index", [](const HaloPlan& plan) { return plan.send_index(); })
      .def_property_readonly("send_rows", &HaloPlan::send_rows)
      .def_property_readonly("recv_rows", &HaloPlan::recv_rows)
      .def_property_readonly("local_edges", &HaloPlan::local_edges)
      .def_property_readonly("interior", &HaloPlan::interior)
      .def_property_readonly("boundary", &HaloPlan::boundary)
      .def("verify", &HaloPlan::verify, Release());
  py::class_<PendingRows>(module, "PendingRows").def("finish", &PendingRows::finish, Release());
  module.def("edges_of_part", &graph_parallel::edges_of_part);
  module.def("halo_exchange", &graph_parallel::halo_exchange, Release());
  module.def("halo_accumulate", &graph_parallel::halo_accumulate, Release());
  module.def("halo_extend", &graph_parallel::halo_extend, Release());
  module.def("halo_exchange_async", &graph_parallel::halo_exchange_async, Release());
  module.def("halo_accumulate_async", &graph_parallel::halo_accumulate_async, Release());
}

void bind_neighbour_sum(py::module_& module) {
  py::class_<Adjacency>(module, "Adjacency")
      .def(py::init<const Tensor&, std::int64_t, std::int64_t>(), py::arg("edge_index"),
           py::arg("num_sources"), py::arg("num_targets"))
      .def_property_readonly("num_sources", &Adjacency::num_sources)
      .def_property_readonly("num_targets", &Adjacency::num_targets)
      .def_property_readonly("num_edges", &Adjacency::num_edges)
      .def("reversed", &Adjacency::reversed);
  module.def(
      "neighbour_sum",
      [](const Tensor& rows, const Adjacency& adjacency, const MaybeTensor& weights) {
        return graph_parallel::neighbour_sum(rows, adjacency, tensor_of(weights));
      },
      Release());
}

// What gp_utils needs besides the regions; the groups themselves are torch.distributed's.
void bind_tensor_parts(py::module_& module) {
  module.def("ensure_div", &graph_parallel::ensure_div);
  module.def("divide_and_check_no_remainder", &graph_parallel::divide_and_check_no_remainder);
  module.def("pad_tensor",
             py::overload_cast<const Tensor&, std::int64_t, std::optional<std::int64_t>, int>(
                 &graph_parallel::pad_tensor));
  module.def("trim_tensor",
             [](const Tensor& tensor, const MaybeTensor& sizes, std::int64_t dim, int num_parts) {
               const auto [trimmed, left] =
                   graph_parallel::trim_tensor(tensor, tensor_of(sizes), dim, num_parts);
               return std::pair(trimmed, sizes ? MaybeTensor(left) : MaybeTensor());
             });
  module.def("split_tensor", &graph_parallel::_split_tensor);
  module.def("agree_on_setup", &graph_parallel::detail::agree_on_setup, py::arg("gp_gpus"),
             py::arg("is_set_up"), py::arg("backend"), py::arg("world"), Release());
}

}  // namespace

void bind_graph_parallel(py::module_& module) {
  py::module_ sub = module.def_submodule("graph_parallel", "Partitions and halos of a graph.");
  bind_partition(sub);
  bind_halo(sub);
  bind_neighbour_sum(sub);
  bind_tensor_parts(sub);
}

}  // namespace tessera::python
