#include <exception>

#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "tessera/comm/error.h"

namespace tessera::python {
namespace {

void translate_error(std::exception_ptr exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const comm::Error& error) {
    const py::object type = py::module_::import("tessera._error").attr("CommError");
    const py::object value =
        type(error.what_without_backtrace(), comm::name_of(error.kind()), error.ranks());
    PyErr_SetObject(type.ptr(), value.ptr());
  } catch (const c10::Error&) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

}  // namespace

void bind_error(py::module_&) { py::register_local_exception_translator(translate_error); }

}  // namespace tessera::python
