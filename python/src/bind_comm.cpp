#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings.h"
#include "tessera/comm/backend.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/group.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/store.h"
#include "tessera/comm/topology.h"

namespace tessera::python {
namespace {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using Store = c10::intrusive_ptr<c10d::Store>;

void bind_environment(py::module_& module) {
  using comm::Environment;
  py::class_<Environment>(module, "Environment",
                          "What a launcher says about this process and its job.")
      .def_readonly("rank", &Environment::rank)
      .def_readonly("world_size", &Environment::world_size)
      .def_readonly("local_rank", &Environment::local_rank)
      .def_readonly("local_world_size", &Environment::local_world_size)
      .def_readonly("node_rank", &Environment::node_rank)
      .def_readonly("master_addr", &Environment::master_addr)
      .def_readonly("master_port", &Environment::master_port)
      .def_readonly("agent_store", &Environment::agent_store)
      .def_readonly("store", &Environment::store)
      .def_readonly("run_id", &Environment::run_id)
      .def_readonly("restart_count", &Environment::restart_count)
      .def_readonly("launcher", &Environment::launcher)
      .def("__repr__", [](const Environment& self) {
        return "Environment(rank=" + std::to_string(self.rank) +
               ", world_size=" + std::to_string(self.world_size) + ", launcher='" + self.launcher +
               "')";
      });
  module.def("read_environment", &comm::read_environment, R"(
Read which rank this process is from its launcher's variables.

Those of `tessera run` and torchrun come first, then Slurm's, then Open MPI's; a process without any
is a world of one. Raises ValueError naming the variable that makes no sense.

>>> read_environment().world_size
1
)");
  module.def("check_open_store", &comm::check_open_store, py::arg("environment"),
             "Warn once of a store that asks for no secret; refuse it at a public address.");
  module.def("connect_store", &comm::connect_store, py::arg("environment"), py::arg("timeout"),
             Release(), "Connect to the store of the job that `environment` describes.");
}

void bind_topology(py::module_& module) {
  module.def("get_local_size", &comm::get_local_size, py::arg("world_size") = py::none());
  module.def("get_local_rank", &comm::get_local_rank, py::arg("world_size") = py::none(),
             py::arg("rank") = py::none());
  module.def("get_group_rank", &comm::get_group_rank, py::arg("world_size") = py::none(),
             py::arg("rank") = py::none());
  module.def("get_num_groups", &comm::get_num_groups, py::arg("world_size") = py::none());
}

}  // namespace

void bind_comm(py::module_& module) {
  bind_environment(module);
  bind_topology(module);
  module.def(
      "default_timeout", [] { return comm::default_group_options().timeout; },
      "Return the limit of every wait unless told otherwise: TESSERA_TIMEOUT or ten minutes.");
  module.def(
      "make_backend",
      [](const Store& store, int rank, int size, std::chrono::milliseconds timeout,
         const std::string& name, const std::vector<int>& world_ranks) {
        auto options = comm::default_group_options();
        options.timeout = timeout;
        options.name = name;
        options.world_ranks = world_ranks;
        return comm::make_backend(store, rank, size, options);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"),
      py::arg("world_ranks"), Release(), "Make the engine of one rank. Collective.");
  module.def(
      "engine", [](const ProcessGroup& group) { return comm::Group(group).engine(); },
      py::arg("group"));
  module.def(
      "world_rank",
      [](const ProcessGroup& group, int rank) { return comm::Group(group).world_rank(rank); },
      py::arg("group"), py::arg("group_rank"));
  module.def(
      "abort",
      [](const ProcessGroup& group, const std::string& reason) {
        comm::Group(group).abort(reason);
      },
      py::arg("group"), py::arg("reason"), Release());
  module.def(
      "check_mesh",
      [](const ProcessGroup& world, const std::vector<std::pair<std::string, int>>& axes) {
        std::vector<comm::Axis> named;
        for (const auto& [name, size] : axes) named.push_back({name, size});
        comm::Mesh::check(comm::Group(world), named);
      },
      py::arg("world"), py::arg("axes"), Release(),
      "Check that the axes fit the group and are the same on all its ranks. Collective.");
}

}  // namespace tessera::python
