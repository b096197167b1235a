// src/bind_growing.h — tables that grow, in the submodule `collision`.

#pragma once

#include <pybind11/pybind11.h>

namespace tessera::python {

/// After bind_collision and bind_sharding, whose types it uses.
void bind_growing(pybind11::module_& parent);

}  // namespace tessera::python
