// python/src/bindings.h — what module.cpp calls, one function per module of the library.

#pragma once

#include <torch/csrc/utils/pybind.h>

namespace tessera::python {

/// Lets other threads of Python run while a function works.
using Release = pybind11::call_guard<pybind11::gil_scoped_release>;

/// Makes comm::Error arrive as tessera.CommError, and LibTorch's errors as their Python types.
void bind_error(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_failure(pybind11::module_& module);
void bind_collectives(pybind11::module_& module);
void bind_comm_ops(pybind11::module_& module);
void bind_comm_hooks(pybind11::module_& module);
void bind_data_parallel(pybind11::module_& module);
void bind_dist_data(pybind11::module_& module);
void bind_regions(pybind11::module_& module);
void bind_jagged(pybind11::module_& module);
void bind_embedding(pybind11::module_& module);
/// After bind_embedding: it adds to the same module.
void bind_quantised(pybind11::module_& module);
void bind_collision(pybind11::module_& module);
void bind_sharding(pybind11::module_& module);
void bind_pipeline(pybind11::module_& module);
void bind_graph_parallel(pybind11::module_& module);
void bind_vocab_parallel(pybind11::module_& module);
/// Only if the library was built with checkpoints.
void bind_checkpoint(pybind11::module_& module);
/// Only if the library was built with the planner.
void bind_planner(pybind11::module_& module);

}  // namespace tessera::python
