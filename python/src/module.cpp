#include <cstdlib>

#include "bind_growing.h"
#include "bindings.h"
#include "tessera/core/version.h"

PYBIND11_MODULE(_C, module) {
  py::options options;
  // The stubs have them; the test of the stubs asks for them here.
  if (std::getenv("TESSERA_SIGNATURES") == nullptr) options.disable_function_signatures();
  module.doc() = "The engine of tessera. Import its public names from tessera and its modules.";
  module.def("version", &tessera::version, "Return the version of the library, e.g. '0.1.0'.");
  module.def("torch_version", &tessera::torch_version,
             "Return the version of torch the library was compiled against.");
  tessera::python::bind_error(module);
  tessera::python::bind_comm(module);
  tessera::python::bind_failure(module);
  tessera::python::bind_collectives(module);
  tessera::python::bind_comm_ops(module);
  tessera::python::bind_comm_hooks(module);
  tessera::python::bind_data_parallel(module);
  tessera::python::bind_regions(module);
  tessera::python::bind_jagged(module);
  tessera::python::bind_embedding(module);
  tessera::python::bind_quantised(module);
  tessera::python::bind_collision(module);
  tessera::python::bind_dist_data(module);
  tessera::python::bind_sharding(module);
  tessera::python::bind_pipeline(module);
  tessera::python::bind_growing(module);
  tessera::python::bind_graph_parallel(module);
  tessera::python::bind_vocab_parallel(module);
#ifdef TESSERA_HAVE_CHECKPOINT
  tessera::python::bind_checkpoint(module);
#endif
#ifdef TESSERA_HAVE_PLANNER
  tessera::python::bind_planner(module);
#endif
}
