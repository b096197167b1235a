#include <memory>

#include "bindings.h"
#include "option_fields.h"
#include "tessera/pipeline/loop.h"

namespace tessera::python {
namespace {

using pipeline::Flight;
using pipeline::Loop;
using pipeline::LoopOptions;
using pipeline::StepReport;

/// A batch of a Python program.
struct PythonFlight final : Flight {
  explicit PythonFlight(py::object given) : batch(std::move(given)) {}
  py::object batch;
};

py::object& object_of(Flight& flight) { return static_cast<PythonFlight&>(flight).batch; }

/// What a Python pipeline does with its batches: its methods of the same names. It is given with
/// every call, not kept, for Python cannot collect circles that pass through here.
class PythonStages final : public pipeline::Stages {
 public:
  PythonStages(py::handle pipeline, py::handle batches) : pipeline_(pipeline), batches_(batches) {}

  std::unique_ptr<Flight> read() override {
    py::object batch = pipeline_.attr("_read")(batches_);
    return batch.is_none() ? nullptr : std::make_unique<PythonFlight>(std::move(batch));
  }
  std::int64_t start(Flight& batch) override {
    return pipeline_.attr("_start")(object_of(batch)).cast<std::int64_t>();
  }
  void wait_sizes(Flight& batch) override { call("_wait_sizes", batch); }
  void wait_ids(Flight& batch) override { call("_wait_ids", batch); }
  void prefetch(Flight& batch) override { call("_prefetch", batch); }
  void forward(Flight& batch) override { call("_run_forward", batch); }
  bool trains() override { return pipeline_.attr("_is_training")().cast<bool>(); }
  void zero_grad() override { pipeline_.attr("_zero_grad")(); }
  void backward(Flight& batch) override { call("_backward", batch); }
  void step() override { pipeline_.attr("_step")(); }

 private:
  void call(const char* name, Flight& batch) { pipeline_.attr(name)(object_of(batch)); }

  py::handle pipeline_;
  py::handle batches_;
};

void bind_report(py::module_& module) {
  py::class_<StepReport>(module, "StepReport")
      .def_readonly("read", &StepReport::read)
      .def_readonly("start_dist", &StepReport::start_dist)
      .def_readonly("wait_ids", &StepReport::wait_ids)
      .def_readonly("wait_sizes", &StepReport::wait_sizes)
      .def_readonly("prefetch", &StepReport::prefetch)
      .def_readonly("zero_grad", &StepReport::zero_grad)
      .def_readonly("forward", &StepReport::forward)
      .def_readonly("backward", &StepReport::backward)
      .def_readonly("step", &StepReport::step)
      .def_readonly("total", &StepReport::total)
      .def_readonly("feature_bytes", &StepReport::feature_bytes);
}

}  // namespace

void bind_pipeline(py::module_& parent) {
  py::module_ module = parent.def_submodule("pipeline");
  bind_report(module);
  options_class<LoopOptions>(module, "LoopOptions")
      .def_readwrite("lead", &LoopOptions::lead)
      .def_readwrite("needed", &LoopOptions::needed)
      .def_readwrite("reads_late", &LoopOptions::reads_late)
      .def_readwrite("prefetches", &LoopOptions::prefetches)
      .def_readwrite("ahead_from", &LoopOptions::ahead_from);
  py::class_<Loop>(module, "Loop")
      .def(py::init<const LoopOptions&>(), py::arg("options"))
      .def(
          "progress",
          [](Loop& self, const py::object& stages, const py::object& batches) -> py::object {
            PythonStages own(stages, batches);
            const std::unique_ptr<Flight> done = self.progress(own);
            if (done == nullptr) return py::none();
            return object_of(*done);
          },
          py::arg("stages"), py::arg("batches"))
      .def(
          "fill",
          [](Loop& self, const py::object& stages, const py::object& batches) {
            PythonStages own(stages, batches);
            self.fill(own);
          },
          py::arg("stages"), py::arg("batches"))
      .def(
          "read_until",
          [](Loop& self, const py::object& stages, const py::object& batches,
             std::size_t num_batches) {
            PythonStages own(stages, batches);
            return self.read_until(own, num_batches);
          },
          py::arg("stages"), py::arg("batches"), py::arg("num_batches"))
      .def("reset", &Loop::reset)
      .def_property_readonly("report", [](const Loop& self) { return self.report(); })
      .def_property_readonly("num_in_flight", &Loop::num_in_flight)
      .def_property_readonly("num_trained", &Loop::num_trained)
      .def_property_readonly("has_failed", &Loop::has_failed);
}

}  // namespace tessera::python
