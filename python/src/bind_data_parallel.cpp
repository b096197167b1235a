#include <pybind11/stl.h>

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings.h"
#include "option_fields.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/replica.h"

namespace tessera::python {
namespace {

using at::Tensor;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;
using namespace data_parallel;

/// A Python object that may be let go of from any thread.
std::shared_ptr<py::object> shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire lock;
            delete held;
          }};
}

std::unique_ptr<Replica> make_replica(
    const std::string& name, const std::vector<std::tuple<std::string, Tensor, bool>>& parameters,
    py::object buffers, bool has_sync_batch_norm, bool has_uninitialized, const ProcessGroup& group,
    Options options) {
  ModelParts parts;
  parts.name = name;
  for (const auto& [parameter_name, tensor, is_sparse] : parameters) {
    parts.parameters.push_back({parameter_name, tensor, is_sparse});
  }
  parts.buffers = [function = shared(std::move(buffers))] {
    const py::gil_scoped_acquire lock;
    std::vector<NamedTensor> result;
    for (auto& [buffer_name, tensor] : (*function)().cast<NamedTensors>()) {
      result.push_back({std::move(buffer_name), std::move(tensor)});
    }
    return result;
  };
  parts.has_sync_batch_norm = has_sync_batch_norm;
  parts.has_uninitialized = has_uninitialized;
  const py::gil_scoped_release release;
  return std::make_unique<Replica>(std::move(parts), comm::Group(group), std::move(options));
}

BufferHook buffer_hook(py::object hook) {
  return [function = shared(std::move(hook))](const std::map<std::string, Tensor>& buffers) {
    const py::gil_scoped_acquire lock;
    std::vector<FuturePtr> futures;
    for (const auto& future :
         (*function)(buffers)
             .cast<std::vector<std::shared_ptr<torch::jit::PythonFutureWrapper>>>()) {
      futures.push_back(future->fut);
    }
    return futures;
  };
}

py::dict report_of(const OverlapReport& report) {
  py::dict words;
  words["forward"] = report.forward;
  words["backward"] = report.backward;
  words["exposed_comm"] = report.exposed_comm;
  words["comm"] = report.comm;
  words["num_buckets"] = report.num_buckets;
  words["bytes"] = report.bytes;
  words["advice"] = report.advice;
  return words;
}

JoinOptions join_options(bool divide_by_initial_world_size) {
  JoinOptions options;
  options.divide_by_initial_world_size = divide_by_initial_world_size;
  return options;
}

}  // namespace

void bind_data_parallel(py::module_& module) {
  options_class<Options>(module, "DataParallelOptions")
      .def_readwrite("forward_sync_buffers", &Options::forward_sync_buffers)
      .def_readwrite("broadcast_buffers", &Options::broadcast_buffers)
      .def_readwrite("init_sync", &Options::init_sync)
      .def_readwrite("bucket_cap_mb", &Options::bucket_cap_mb)
      .def_readwrite("bucket_cap_mb_list", &Options::bucket_cap_mb_list)
      .def_readwrite("find_unused_parameters", &Options::find_unused_parameters)
      .def_readwrite("skip_all_reduce_unused_params", &Options::skip_all_reduce_unused_params)
      .def_readwrite("static_graph", &Options::static_graph)
      .def_readwrite("automatic_graph", &Options::automatic_graph)
      .def_readwrite("gradient_as_bucket_view", &Options::gradient_as_bucket_view)
      .def_readwrite("direct_gradients", &Options::direct_gradients)
      .def_readwrite("batched_grad_copy", &Options::batched_grad_copy)
      .def_readwrite("ignored", &Options::ignored)
      .def_readwrite("delay_all_reduce_named_params", &Options::delay_all_reduce_named_params)
      .def_readwrite("param_to_hook_all_reduce", &Options::param_to_hook_all_reduce)
      .def_readwrite("device_ids", &Options::device_ids)
      .def_readwrite("output_device", &Options::output_device)
      .def_readwrite("divisor", &Options::divisor)
      .def_readwrite("overlap", &Options::overlap)
      .def_readwrite("check_finalized", &Options::check_finalized);
  py::class_<Replica>(module, "Replica", "One rank's copy of a model, kept equal to the others'.")
      .def(py::init(&make_replica), py::arg("name"), py::arg("parameters"), py::arg("buffers"),
           py::arg("has_sync_batch_norm"), py::arg("has_uninitialized"), py::arg("group"),
           py::arg("options"))
      .def("before_forward", &Replica::before_forward, Release())
      .def(
          "before_forward_joined",
          [](Replica& self, bool divide_by_initial_world_size) {
            self.before_forward_joined(join_options(divide_by_initial_world_size));
          },
          py::arg("divide_by_initial_world_size"), Release())
      .def("after_forward", &Replica::after_forward, py::arg("outputs"), Release())
      .def("prepare_for_backward", &Replica::prepare_for_backward, py::arg("outputs"), Release())
      .def_property("require_forward_param_sync", &Replica::require_forward_param_sync,
                    &Replica::set_require_forward_param_sync)
      .def_property("require_backward_grad_sync", &Replica::require_backward_grad_sync,
                    &Replica::set_require_backward_grad_sync)
      .def("register_comm_hook", &Replica::register_comm_hook, py::arg("hook"))
      .def("comm_hook", &Replica::comm_hook)
      .def(
          "register_buffer_hook",
          [](Replica& self, py::object hook, bool is_pre_forward) {
            self.register_buffer_hook(
                buffer_hook(std::move(hook)),
                is_pre_forward ? BufferHookPlace::kPreForward : BufferHookPlace::kPostForward);
          },
          py::arg("hook"), py::arg("is_pre_forward"))
      .def("sync_buffers", &Replica::sync_buffers, Release())
      .def("set_sink_clone", &Replica::set_sink_clone, py::arg("value"))
      .def("set_static_graph", &Replica::set_static_graph)
      .def(
          "update_process_group",
          [](Replica& self, const ProcessGroup& group) {
            self.update_process_group(comm::Group(group));
          },
          py::arg("group"), Release())
      .def("reset", &Replica::reset, Release())
      .def("check_finalized", &Replica::check_finalized, Release())
      .def("remove_autograd_hooks", &Replica::remove_autograd_hooks, Release())
      .def("set_sample_rate", &Replica::set_sample_rate, py::arg("sample_rate"))
      .def("set_sparse_metadata", &Replica::set_sparse_metadata, py::arg("metadata"))
      .def_property_readonly("options", [](const Replica& self) { return self.options(); })
      .def("divisor", &Replica::divisor)
      .def("buckets", &Replica::buckets)
      .def("used_map", &Replica::used_map)
      .def("is_graph_static", &Replica::is_graph_static)
      .def("log_error", &Replica::log_error, py::arg("text"))
      .def("logging_data",
           [](Replica& self) {
             py::dict words;
             LoggingData data;
             {
               const py::gil_scoped_release release;
               data = self.logging_data();
             }
             for (const auto& [name, value] : data.strings) words[py::str(name)] = value;
             for (const auto& [name, value] : data.integers) words[py::str(name)] = value;
             return words;
           })
      .def("overlap_report", [](Replica& self) { return report_of(self.overlap_report()); })
      .def(
          "shadow_iteration",
          [](Replica& self, bool divide_by_initial_world_size) {
            self.shadow_iteration(join_options(divide_by_initial_world_size));
          },
          py::arg("divide_by_initial_world_size"), Release())
      .def("finish_join", &Replica::finish_join, py::arg("is_last_joiner"), Release());
}

}  // namespace tessera::python
