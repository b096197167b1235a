// python/src/option_fields.h — structs of options, whose fields Python gives by name.

#pragma once

#include <memory>
#include <string>

#include <torch/csrc/utils/pybind.h>

namespace tessera::python {

/// Sets the fields of `options`, which Python sees. Throws TypeError for what is no field, and for
/// a value that a field cannot hold; both name the field.
inline void set_fields(const py::object& options, const py::kwargs& fields) {
  const py::handle type = py::type::handle_of(options);
  const auto name = py::str(type.attr("__name__")).cast<std::string>();
  for (const std::pair<py::handle, py::handle> given : fields) {
    const auto field = given.first.cast<std::string>();
    if (!py::hasattr(type, given.first)) {
      throw py::type_error(name + ": there is no '" + field + "'.");
    }
    try {
      py::setattr(options, given.first, given.second);
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      throw py::type_error(name + ": " + field + " cannot be " +
                           py::repr(given.second).cast<std::string>() + ".");
    }
  }
}

/// Binds a struct of options, whose fields follow as `def_readwrite`. The constructor takes any of
/// them, and of those of the bases, by name; the others keep their defaults.
template <class Options, class... Bases>
py::class_<Options, Bases...> options_class(py::module_& module, const char* name,
                                            const char* doc = "") {
  py::class_<Options, Bases...> bound(module, name, doc);
  bound.def(py::init([](const py::kwargs& fields) {
    auto options = std::make_unique<Options>();
    set_fields(py::cast(options.get(), py::return_value_policy::reference), fields);
    return options;
  }));
  return bound;
}

}  // namespace tessera::python
