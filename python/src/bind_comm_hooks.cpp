#include <pybind11/stl.h>

#include <unordered_map>

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "bindings.h"
#include "option_fields.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/deterministic.h"
#include "tessera/data_parallel/fingerprint.h"
#include "tessera/data_parallel/finite_check.h"
#include "tessera/data_parallel/gradient_clipping.h"
#include "tessera/data_parallel/hooks.h"
#include "tessera/data_parallel/model_averaging.h"
#include "tessera/data_parallel/optimizer_in_backward.h"
#include "tessera/data_parallel/powersgd.h"

namespace tessera::python {
namespace {

using at::Tensor;
using comm::Group;
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using PythonFuture = std::shared_ptr<torch::jit::PythonFutureWrapper>;
using State = std::pair<std::map<std::string, Tensor>, std::map<std::string, std::int64_t>>;
using namespace data_parallel;

PythonFuture wrapped(FuturePtr future) {
  return std::make_shared<torch::jit::PythonFutureWrapper>(std::move(future));
}

/// A hook written in Python: (state, bucket) -> future. Its objects live and die under the
/// interpreter's lock.
class PythonHook final : public CommHook {
 public:
  PythonHook(py::object state, py::object hook, std::string name)
      : state_(std::move(state)), hook_(std::move(hook)), name_(std::move(name)) {}
  ~PythonHook() override {
    const py::gil_scoped_acquire lock;
    state_ = py::object();
    hook_ = py::object();
  }

  FuturePtr reduce(Bucket& bucket) override {
    const py::gil_scoped_acquire lock;
    // A copy of the handle: callbacks may keep it.
    const py::object result = hook_(state_, py::cast(bucket));
    TESSERA_CHECK_TYPE(py::isinstance<torch::jit::PythonFutureWrapper>(result), "ddp.hook: '",
                       name_, "' returned ", py::str(py::type::of(result)).cast<std::string>(),
                       ". It must return a torch.futures.Future.");
    const auto future = result.cast<PythonFuture>()->fut;
    return future->then(
        [name = name_](c10::ivalue::Future& done) -> c10::IValue {
          c10::IValue value = done.value();
          if (!value.isPyObject()) return value;
          const py::gil_scoped_acquire again;
          const py::object object = torch::jit::toPyObject(value);
          TESSERA_CHECK_TYPE(THPVariable_Check(object.ptr()), "ddp.hook: the future of '", name,
                             "' holds ", py::str(py::type::of(object)).cast<std::string>(),
                             ", not a tensor.");
          return THPVariable_Unpack(object.ptr());
        },
        c10::TensorType::get());
  }

  std::string name() const override { return name_; }

 private:
  py::object state_;
  py::object hook_;
  std::string name_;
};

/// An optimizer that is a Python function of the bucket's names and averaged gradients.
class PythonOptimizer final : public BackwardOptimizer {
 public:
  explicit PythonOptimizer(py::object step) : step_(std::move(step)) {}
  ~PythonOptimizer() override {
    const py::gil_scoped_acquire gil;
    step_ = py::object();
  }

  void step(const Bucket& bucket, const Tensor& averaged,
            const std::optional<std::set<std::string>>&) override {
    const py::gil_scoped_acquire gil;
    step_(bucket.names(), bucket.views_of(averaged));
  }
  std::string name() const override { return "python"; }
  // Rates and state are the function's own.
  void set_learning_rate(double) override {}
  double learning_rate() const override { return 0; }
  HookState state() const override { return {}; }
  void load_state(const HookState&) override {}

 private:
  py::object step_;
};

/// Runs a hook from Python, on buckets of ours and of torch's DistributedDataParallel.
class HookRunner {
 public:
  explicit HookRunner(HookPtr hook) : hook_(std::move(hook)) {}

  PythonFuture run(Bucket bucket, const std::optional<ProcessGroup>& group) {
    if (group && *group != bucket.group().process_group()) {
      bucket = Bucket(bucket.index(), bucket.is_last(), bucket.buffer(), bucket.names(),
                      bucket.parameters(), Group(*group), (*group)->getSize());
    }
    FuturePtr future = hook_->reduce(bucket);
    if (bucket.is_last()) hook_->end_step();
    return wrapped(std::move(future));
  }

  /// torch's buckets know no names and, in a static graph's first step, not which is the last. So
  /// parameters are numbered as they are first seen, and no bucket waits for a later one.
  PythonFuture run_torch(const c10d::GradBucket& grad_bucket, const ProcessGroup& group) {
    std::vector<std::string> names;
    const std::vector<Tensor> parameters = grad_bucket.getParameters();
    for (const Tensor& parameter : parameters) {
      const auto [place, is_new] =
          numbers_.emplace(parameter.unsafeGetTensorImpl(), numbers_.size());
      names.push_back("parameter " + std::to_string(place->second));
    }
    Bucket bucket(grad_bucket.getIndex(), grad_bucket.isLast(), grad_bucket.getBuffer(), names,
                  parameters, Group(group), group->getSize());
    FuturePtr future = hook_->reduce(bucket);
    hook_->flush();
    if (bucket.is_last()) hook_->end_step();
    return wrapped(std::move(future));
  }

 private:
  HookPtr hook_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> numbers_;
};

template <class Enum>
Enum named(const std::string& name, const std::vector<std::pair<std::string, Enum>>& values) {
  std::string all;
  for (const auto& [known, value] : values) {
    if (known == name) return value;
    all.append(all.empty() ? "'" : ", '").append(known).append("'");
  }
  throw py::value_error("ddp.hook: '" + name + "' is none of " + all + ".");
}

NonFinitePolicy policy_named(const std::string& name) {
  return named<NonFinitePolicy>(name, {{"raise", NonFinitePolicy::kRaise},
                                       {"skip", NonFinitePolicy::kSkipStep},
                                       {"zero", NonFinitePolicy::kZeroRank}});
}

void bind_buckets(py::module_& m) {
  py::class_<Bucket>(m, "GradBucket", "The gradients of some parameters in one flat buffer.")
      .def("index", &Bucket::index)
      .def("is_last", &Bucket::is_last)
      .def("buffer", &Bucket::buffer)
      .def("set_buffer", &Bucket::set_buffer, py::arg("buffer"))
      .def("gradients", &Bucket::gradients)
      .def("parameters", &Bucket::parameters)
      .def("names", &Bucket::names)
      .def("divisor", &Bucket::divisor)
      .def("group", [](const Bucket& self) { return self.group().process_group(); });
  py::class_<CommHook, std::shared_ptr<CommHook>>(m, "CommHook")
      .def("name", &CommHook::name)
      .def("bytes_sent", &CommHook::bytes_sent)
      .def("reset", &CommHook::reset)
      .def("consumes_gradients", &CommHook::consumes_gradients)
      .def(
          "state",
          [](const CommHook& self) -> State {
            HookState state = self.state();
            return {std::move(state.tensors), std::move(state.numbers)};
          },
          Release())  // it may be collective
      .def("load_state", [](CommHook& self, State state) {
        self.load_state({std::move(state.first), std::move(state.second)});
      });
  py::class_<HookRunner, std::shared_ptr<HookRunner>>(m, "HookRunner")
      .def(py::init<HookPtr>(), py::arg("hook"))
      .def("run", &HookRunner::run, py::arg("bucket"), py::arg("group") = py::none(), Release())
      .def("run_torch", &HookRunner::run_torch, py::arg("bucket"), py::arg("group"), Release());
  m.def("python_hook", [](py::object state, py::object hook, const std::string& name) -> HookPtr {
    return std::make_shared<PythonHook>(std::move(state), std::move(hook), name);
  });
}

void bind_hooks(py::module_& m) {
  m.def("all_reduce_hook", &all_reduce_hook);
  m.def("compress_hook", &compress_hook, py::arg("dtype"));
  m.def("noop_hook", &noop_hook);
  m.def("quantization_per_tensor_hook", &quantization_per_tensor_hook);
  m.def("quantization_per_channel_hook", &quantization_per_channel_hook, py::arg("channel_size"));
  m.def("int8_error_feedback_hook", &int8_error_feedback_hook);
  m.def("compress_wrapper", &compress_wrapper, py::arg("inner"), py::arg("dtype"));
  m.def("deterministic_hook", &deterministic_hook);
  m.def(
      "post_local_sgd_hook",
      [](const std::optional<ProcessGroup>& subgroup, std::int64_t start_step,
         bool reduce_in_subgroup) {
        PostLocalSgdOptions options{.start_step = start_step,
                                    .reduce_in_subgroup = reduce_in_subgroup};
        if (subgroup) options.subgroup = Group(*subgroup);
        return post_local_sgd_hook(options);
      },
      py::arg("subgroup"), py::arg("start_step"), py::arg("reduce_in_subgroup"));

  py::class_<PowerSgd, CommHook, std::shared_ptr<PowerSgd>>(m, "PowerSgd")
      .def_property_readonly("step", &PowerSgd::step)
      .def("stats",
           [](const PowerSgd& self) { return std::pair(self.stats().before, self.stats().after); });
  options_class<PowerSgdOptions>(m, "PowerSgdOptions")
      .def_readwrite("matrix_approximation_rank", &PowerSgdOptions::matrix_approximation_rank)
      .def_readwrite("start_step", &PowerSgdOptions::start_step)
      .def_readwrite("min_compression_rate", &PowerSgdOptions::min_compression_rate)
      .def_readwrite("use_error_feedback", &PowerSgdOptions::use_error_feedback)
      .def_readwrite("warm_start", &PowerSgdOptions::warm_start)
      .def_readwrite("orthogonalization_epsilon", &PowerSgdOptions::orthogonalization_epsilon)
      .def_readwrite("random_seed", &PowerSgdOptions::random_seed)
      .def_readwrite("batched", &PowerSgdOptions::batched);
  m.def("power_sgd_hook", &power_sgd_hook, py::arg("options"));

  py::class_<FiniteCheck, CommHook, std::shared_ptr<FiniteCheck>>(m, "FiniteCheck")
      .def_property_readonly("skip_step", &FiniteCheck::skip_step)
      .def_property_readonly("found", [](const FiniteCheck& self) {
        std::vector<std::tuple<int, std::string, std::string>> found;
        for (const NonFinite& one : self.found()) {
          found.emplace_back(one.rank, one.parameter, one.is_nan ? "NaN" : "infinity");
        }
        return found;
      });
  m.def(
      "finite_check_hook",
      [](HookPtr inner, const std::string& policy) {
        return finite_check_hook(std::move(inner), policy_named(policy));
      },
      py::arg("inner"), py::arg("policy"));
  py::class_<GradientClipping, CommHook, std::shared_ptr<GradientClipping>>(m, "GradientClipping")
      .def_property_readonly("total_norm", &GradientClipping::total_norm);
  m.def(
      "clipping_hook",
      [](HookPtr inner, double max_norm, double norm_type, bool error_if_nonfinite) {
        return clipping_hook(std::move(inner), {max_norm, norm_type, error_if_nonfinite});
      },
      py::arg("inner"), py::arg("max_norm"), py::arg("norm_type"), py::arg("error_if_nonfinite"));
}

void bind_optimizers(py::module_& m) {
  py::class_<BackwardOptimizer, std::shared_ptr<BackwardOptimizer>>(m, "BackwardOptimizer")
      .def_property("lr", &BackwardOptimizer::learning_rate, &BackwardOptimizer::set_learning_rate)
      .def("name", &BackwardOptimizer::name);
  m.def(
      "sgd_in_backward",
      [](double lr, double momentum, double dampening, double weight_decay, bool nesterov,
         bool maximize) {
        return sgd_in_backward({lr, momentum, dampening, weight_decay, nesterov, maximize});
      },
      py::arg("lr") = 1e-3, py::arg("momentum") = 0.0, py::arg("dampening") = 0.0,
      py::arg("weight_decay") = 0.0, py::arg("nesterov") = false, py::arg("maximize") = false);
  const auto adam = [](bool decoupled) {
    return [decoupled](double lr, const std::pair<double, double>& betas, double eps,
                       double weight_decay, bool amsgrad, bool maximize) {
      const AdamOptions options{lr,           betas.first, betas.second, eps,
                                weight_decay, amsgrad,     maximize};
      return decoupled ? adamw_in_backward(options) : adam_in_backward(options);
    };
  };
  m.def("adam_in_backward", adam(false), py::arg("lr") = 1e-3,
        py::arg("betas") = std::pair(0.9, 0.999), py::arg("eps") = 1e-8,
        py::arg("weight_decay") = 0.0, py::arg("amsgrad") = false, py::arg("maximize") = false);
  m.def("adamw_in_backward", adam(true), py::arg("lr") = 1e-3,
        py::arg("betas") = std::pair(0.9, 0.999), py::arg("eps") = 1e-8,
        py::arg("weight_decay") = 0.01, py::arg("amsgrad") = false, py::arg("maximize") = false);
  m.def(
      "python_in_backward",
      [](py::object step) -> std::shared_ptr<BackwardOptimizer> {
        return std::make_shared<PythonOptimizer>(std::move(step));
      },
      py::arg("step"));
  m.def("hook_then_optimizer", &hook_then_optimizer, py::arg("inner"), py::arg("optimizer"),
        py::arg("only") = py::none());
  m.def("hook_then_zero_step", &hook_then_zero_step, py::arg("inner"), py::arg("optimizer"));
}

void bind_replicas(py::module_& m) {
  m.def(
      "average_parameters",
      [](const std::vector<Tensor>& parameters, const ProcessGroup& group) {
        average_parameters(parameters, Group(group));
      },
      py::arg("parameters"), py::arg("group"), Release());
  py::class_<PeriodicModelAverager>(m, "PeriodicModelAverager")
      .def(py::init([](const ProcessGroup& group, std::int64_t period, std::int64_t warmup_steps) {
             return PeriodicModelAverager(Group(group), period, warmup_steps);
           }),
           py::arg("group"), py::arg("period"), py::arg("warmup_steps"))
      .def("average_parameters", &PeriodicModelAverager::average_parameters, Release())
      .def_property("step", &PeriodicModelAverager::step, &PeriodicModelAverager::set_step);
  py::class_<HierarchicalModelAverager>(m, "HierarchicalModelAverager")
      .def(py::init([](const std::vector<std::pair<std::int64_t, ProcessGroup>>& levels,
                       std::int64_t warmup_steps) {
             std::vector<HierarchicalModelAverager::Level> groups;
             for (const auto& [period, group] : levels) groups.push_back({period, Group(group)});
             return HierarchicalModelAverager(std::move(groups), warmup_steps);
           }),
           py::arg("levels"), py::arg("warmup_steps"))
      .def("average_parameters", &HierarchicalModelAverager::average_parameters, Release())
      .def_property("step", &HierarchicalModelAverager::step, &HierarchicalModelAverager::set_step);
  py::class_<ReplicaFingerprint>(m, "ReplicaFingerprint")
      .def(py::init([](const ProcessGroup& group, std::int64_t every) {
             return ReplicaFingerprint(Group(group), every);
           }),
           py::arg("group"), py::arg("every"))
      .def("check", &ReplicaFingerprint::check, Release())
      .def_property_readonly("step", &ReplicaFingerprint::step);
  m.def("fingerprint", &fingerprint, py::arg("tensor"), Release());
}

}  // namespace

void bind_comm_hooks(py::module_& module) {
  bind_buckets(module);
  bind_hooks(module);
  bind_optimizers(module);
  bind_replicas(module);
}

}  // namespace tessera::python
