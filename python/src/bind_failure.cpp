#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include <pybind11/stl.h>

#include "bindings.h"
#include "tessera/comm/error.h"
#include "tessera/comm/failure.h"
#include "tessera/core/error_file.h"

namespace tessera::python {
namespace {

int final_exit_code = 0;

// The interpreter decides its exit code itself, so the wish is granted after it has ended.
void set_exit_code(int code) {
  if (final_exit_code == 0) {
    std::atexit([] {
      std::fflush(nullptr);
      ::_exit(final_exit_code);
    });
  }
  final_exit_code = code;
}

comm::ErrorKind kind_named(const std::string& name) {
  for (int value = 0; value <= static_cast<int>(comm::ErrorKind::kRendezvous); ++value) {
    const auto kind = static_cast<comm::ErrorKind>(value);
    if (name == comm::name_of(kind)) return kind;
  }
  throw py::value_error("comm.report_failure: there is no kind of error '" + name + "'.");
}

}  // namespace

void bind_failure(py::module_& module) {
  module.def(
      "report_failure", [](const std::string& reason) { comm::report_failure(reason); },
      py::arg("reason"), Release(), "Tell every group of this process that it failed.");
  module.def(
      "report_comm_error",
      [](const std::string& kind, const std::vector<int>& ranks, const std::string& text) {
        comm::report_failure(std::make_exception_ptr(comm::Error(kind_named(kind), ranks, text)));
      },
      py::arg("kind"), py::arg("ranks"), py::arg("text"), Release(),
      "Pass the failure of a peer on to every group of this process, unchanged.");
  module.def(
      "last_error",
      []() -> std::optional<std::tuple<std::string, std::vector<int>, std::string>> {
        const auto error = comm::last_error();
        if (!error) return std::nullopt;
        return std::tuple(std::string(comm::name_of(error->kind())), error->ranks(),
                          std::string(error->what_without_backtrace()));
      },
      "Return kind, ranks and text of the last error a group of this process ended with.");
  module.def("set_step", &comm::set_step, py::arg("step"),
             "Name the training step this process is at, for error messages.");
  module.def("install_failure_handler", &comm::install_failure_handler);
  module.def("set_exit_code", &set_exit_code, py::arg("code"),
             "Make the process end with `code` whatever the interpreter returns.");
  module.def(
      "write_error_file",
      [](const std::string& message, const std::string& callstack, bool is_secondary) {
        core::ErrorReport report;
        report.message = message;
        report.callstack = callstack;
        report.is_secondary = is_secondary;
        return core::write_error_file(report);
      },
      py::arg("message"), py::arg("callstack"), py::arg("is_secondary"),
      "Write the launcher's error file; the first report wins. Return whether this one did.");
}

}  // namespace tessera::python
