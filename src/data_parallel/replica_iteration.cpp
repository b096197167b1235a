// One iteration: what happens before a forward, after it, and while backward runs.

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/engine.h>

#include "comm/executor.h"
#include "core/autograd.h"
#include "data_parallel/replica_state.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

using torch::autograd::Engine;

constexpr int kWatchedIterations = 5;
constexpr std::size_t kMaxNames = 20;

Moment now() { return std::chrono::steady_clock::now(); }

// Passes outputs on through one node, which hands undefined gradients through: what only an ignored
// output depends on then still reports to the reducer, without a gradient. Copies, because a loss
// may change its input in place.
class Sink : public torch::autograd::Function<Sink> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList outputs, bool copies) {
    context->set_materialize_grads(false);
    variable_list result;
    result.reserve(outputs.size());
    for (const at::Tensor& output : outputs) result.push_back(copies ? output.clone() : output);
    return result;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) {
    gradients.emplace_back();  // of `copies`
    return gradients;
  }
};

}  // namespace

void Replica::State::before_forward(const JoinOptions* join) {
  has_had_forward_ = true;
  if (!reducer) return;
  const bool has_gradients = at::GradMode::is_enabled();
  const bool has_sync = has_gradients && require_backward_grad_sync;
  if (has_gradients) {
    // A backward that an exception ended has not failed us.
    const bool is_unfinished = iteration_ && reducer->is_unfinished();
    const bool is_cut = is_unfinished && iteration_->progress == Iteration::Progress::kRunning;
    if (has_failed_ || is_cut) {
      drop_cut_backward();
    } else if (is_unfinished) {
      throw_unfinished();
    }
  }
  if (has_gradients) check_frozen();
  if (is_alone_ && join == nullptr) return;
  timeline_.forward_begin = now();
  if (has_sync) log->begin_iteration(*reducer);
  // Buffers are left alone without gradients, so that one rank may evaluate by itself.
  const bool has_buffers = has_gradients && require_forward_param_sync &&
                           (buffer_hook_ ? buffer_hook_place_ == BufferHookPlace::kPreForward
                                         : syncs_forward_buffers() && num_buffers_ > 0);
  join_divisor_.reset();
  int source = 0;
  if (join != nullptr) {
    log->set("join_uneven_inputs", 1);
    const Control control = exchange_control(/*is_active=*/true, has_buffers);
    set_join_divisor(control.num_active, *join);
    source = control.source;
  }
  if (has_gradients) {
    if (options.automatic_graph && graph_.num_backwards == kWatchedIterations) choose_graph();
    if (reducer->rebuild()) hide_views();
  }
  if (has_buffers) {
    if (buffer_hook_) {
      run_buffer_hook(/*is_shadow=*/false);
    } else {
      sync_buffers(source);
    }
  }
}

void Replica::State::check_frozen() const {
  for (const NamedParameter& parameter : frozen) {
    TORCH_CHECK(!parameter.tensor.requires_grad(), "DistributedDataParallel: '", parameter.name,
                "' did not require a gradient when the module was wrapped, and does now. Its "
                "gradient would stay local; wrap the module again.");
  }
}

std::vector<at::Tensor> Replica::State::after_forward(std::vector<at::Tensor> outputs) {
  const bool has_gradients = at::GradMode::is_enabled();
  const bool has_sync = has_gradients && require_backward_grad_sync;
  if (has_gradients && delayed_) delayed_->expect_backward(has_sync);
  if (!reducer || is_alone_) return outputs;

  if (has_gradients && buffer_hook_ && buffer_hook_place_ == BufferHookPlace::kPostForward) {
    run_buffer_hook(/*is_shadow=*/false);
  }
  if (!has_sync) {
    if (has_gradients) require_forward_param_sync = false;
    return outputs;
  }
  return expect_backward(std::move(outputs), /*can_replace=*/true);
}

void Replica::State::prepare_for_backward(std::vector<at::Tensor> outputs) {
  if (!reducer || is_alone_) return;
  if (delayed_) delayed_->expect_backward(/*has_sync=*/true);
  expect_backward(std::move(outputs), /*can_replace=*/false);
}

std::vector<at::Tensor> Replica::State::expect_backward(std::vector<at::Tensor> outputs,
                                                        bool can_replace) {
  require_forward_param_sync = true;
  const bool is_first_static = reducer->is_learning();
  const bool finds_unused = options.find_unused_parameters && !options.static_graph;
  std::vector<at::Tensor> searched;
  if (finds_unused) {
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.grad_fn()) searched.push_back(output);
    }
    // A loss that is not seen may depend on everything. What it does not depend on is named at the
    // end of backward.
    if (searched.empty()) {
      for (const NamedParameter& parameter : reduced) {
        searched.push_back(parameter.tensor.view_as(parameter.tensor));
      }
    }
  }
  reducer->expect(searched, divides_while_copying() ? std::optional(divisor()) : std::nullopt);
  if (places && !is_first_static) places->open();
  has_had_sync_ = true;
  timeline_.forward_end = now();
  timeline_.num_buckets = 0;

  if (finds_unused && can_replace) {
    std::vector<at::Tensor> passed;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].defined() && outputs[i].grad_fn()) {
        passed.push_back(outputs[i]);
        places.push_back(i);
      }
    }
    if (!passed.empty()) {
      const variable_list sunk = Sink::apply(at::TensorList(passed), has_sink_clone);
      for (std::size_t i = 0; i < places.size(); ++i) outputs[places[i]] = sunk[i];
    }
  }
  watch(outputs, is_first_static);
  return outputs;
}

void Replica::State::watch(std::vector<at::Tensor>& outputs, bool is_first_static) {
  auto iteration = std::make_shared<Iteration>();
  iteration->is_first_static = is_first_static;
  iteration_ = iteration;
  for (at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    const std::size_t index = iteration->has_gradient.size();
    iteration->has_gradient.push_back(false);
    // Whoever holds an output may still run backward, with or without the wrapper.
    output.register_hook([self = shared_from_this(), iteration, index](const at::Tensor&) {
      iteration->has_gradient[index] = true;
      self->begin_backward(iteration);
    });
  }
  // The loss may come from where we do not see it: out of an object, or kept by the module. A
  // static graph that missed its first backward would never reduce anything.
  iteration->begins_with_arrival = iteration->has_gradient.empty() || is_first_static;
}

void Replica::State::begin_backward(const std::shared_ptr<Iteration>& iteration) {
  if (iteration->progress == Iteration::Progress::kRunning) return;
  iteration->progress = Iteration::Progress::kRunning;
  Engine& engine = Engine::get_default_engine();
  if (iteration->is_first_static) {
    engine.queue_callback([self = shared_from_this()] { self->reducer->finish_learning(); });
  }
  // Twice, to come after the reducer's callback.
  engine.queue_callback([self = shared_from_this(), iteration] {
    if (self->options.automatic_graph) self->note_usage();
    Engine::get_default_engine().queue_callback(
        [self, iteration] { self->end_backward(iteration); });
  });
}

FuturePtr Replica::State::reduce(std::size_t index, at::Tensor& buffer) {
  try {
    timeline_.last_bucket = now();
    if (timeline_.num_buckets++ == 0) {
      timeline_.first_bucket = timeline_.last_bucket;
      // Before the reducer's own end of backward: whoever waits there helps.
      if (!is_shadowing_) {
        Engine::get_default_engine().queue_callback(
            [self = shared_from_this()] { self->wait_for_buckets(); });
      }
    }
    if (!user_hook_) return average(buffer);

    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    for (const std::size_t parameter : reducer->buckets()[index].parameters) {
      names.push_back(reduced[parameter].name);
      parameters.push_back(reduced[parameter].tensor);
    }
    const bool is_last = index + 1 == reducer->buckets().size();
    Bucket bucket(index, is_last, buffer, std::move(names), std::move(parameters), group,
                  divisor());
    is_hook_step_open_ = true;
    FuturePtr future = user_hook_->reduce(bucket);
    if (is_last) end_hook_step();
    return future;
  } catch (...) {
    has_failed_ = true;
    throw;
  }
}

FuturePtr Replica::State::average(at::Tensor& buffer) {
  std::vector<at::Tensor> tensors{buffer};
  c10d::AllreduceOptions call;
  const double ranks = divisor();
  if (has_shared_memory_ && ranks == group.size() && !buffer.is_sparse() &&
      buffer.is_floating_point()) {
    call.reduceOp = c10d::ReduceOp::AVG;
  } else if (!divides_while_copying()) {
    buffer.div_(ranks);
  }
  call.asyncOp = has_overlap_ || !has_shared_memory_;
  auto work = group.process_group()->allreduce(tensors, call);
  if (has_overlap_ && has_shared_memory_) works_.push_back(work);  // whoever waits for it helps
  return comm::quiet_future(*work);
}

void Replica::State::end_hook_step() {
  if (!is_hook_step_open_) return;
  is_hook_step_open_ = false;
  user_hook_->end_step();
}

void Replica::State::wait_for_buckets() {
  try {
    end_hook_step();  // the last bucket may have been skipped as unused
    for (const auto& work : works_) work->wait();
  } catch (...) {
    has_failed_ = true;
    throw;
  }
  works_.clear();
}

void Replica::State::end_backward(const std::shared_ptr<Iteration>& iteration) {
  iteration->progress = Iteration::Progress::kEnded;
  timeline_.end = now();
  works_.clear();
  if (places) places->close();
  if (has_had_sync_) hide_views();
  if (iteration != iteration_ || !options.check_finalized) return;
  const bool has_all = std::all_of(iteration->has_gradient.begin(), iteration->has_gradient.end(),
                                   [](bool has_gradient) { return has_gradient; });
  if (reducer->is_unfinished() && has_all) throw_unfinished();
}

void Replica::State::hide_views() const {
  if (!options.gradient_as_bucket_view) return;
  // The same memory without being a view of it for autograd: torch::optim's zero_grad detaches
  // gradients in place, which views refuse.
  for (const NamedParameter& parameter : reduced) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && gradient.is_view()) gradient = gradient.tensor_data();
  }
}

void Replica::State::check_finalized() {
  if (reducer && reducer->is_unfinished()) throw_unfinished();
}

void Replica::State::throw_unfinished() {
  const std::vector<std::size_t> missing = reducer->missing();
  const std::string rank = std::to_string(group.rank());
  std::string names;
  std::string indices;
  for (std::size_t i = 0; i < missing.size() && i < kMaxNames; ++i) {
    names.append(i > 0 ? ", " : "").append(reduced[missing[i]].name);
    indices.append(" ").append(std::to_string(missing[i]));
  }
  if (missing.size() > kMaxNames) {
    names.append(" and ").append(std::to_string(missing.size() - kMaxNames)).append(" more");
  }
  // Programs look for some of torch's phrases, and those are here as torch has them.
  std::string text = "Expected to have finished reduction in this iteration, but on rank ";
  text.append(rank)
      .append(" ")
      .append(std::to_string(missing.size()))
      .append(" of ")
      .append(std::to_string(reduced.size()))
      .append(" parameters of ")
      .append(parts.name)
      .append(" got no gradient in backward. Parameters which did not receive grad for rank ")
      .append(rank)
      .append(": ")
      .append(names)
      .append(" (numbers")
      .append(indices)
      .append("). ");
  if (options.static_graph) {
    text +=
        "With static_graph every iteration must use the same parameters, and the first one decides "
        "which: ";
  } else if (options.find_unused_parameters) {
    text += "Since `find_unused_parameters=True` is enabled, they were used in the forward: ";
  } else {
    text +=
        "If the loss is not meant to depend on them, say so by passing the keyword argument "
        "`find_unused_parameters=True` to DistributedDataParallel, or `static_graph=True` if they "
        "are the same in every iteration; otherwise ";
  }
  text += "make sure that all `forward` function outputs participate in calculating loss.";
  log->set_error(text);
  has_failed_ = true;
  TORCH_CHECK(false, text);
}

void Replica::State::note_usage() {
  if (!options.find_unused_parameters || graph_.num_backwards >= kWatchedIterations) return;
  const at::Tensor used = reducer->used_here();
  if (!used.all().item<bool>()) graph_.has_unused = true;
  if (graph_.last_used.defined() && !graph_.last_used.equal(used)) graph_.has_changed = true;
  graph_.last_used = used;
  ++graph_.num_backwards;
}

void Replica::State::choose_graph() {
  ++graph_.num_backwards;  // once
  const std::vector<std::int64_t> words{graph_.has_unused ? 1 : 0, graph_.has_changed ? 1 : 0};
  at::Tensor flags = at::tensor(words, at::kLong).to(kept.front().tensor.device());
  comm::all_reduce_(flags, group, comm::Reduction::kMax);
  const bool has_unused = flags[0].item<std::int64_t>() != 0;
  const bool has_changed = flags[1].item<std::int64_t>() != 0;
  if (has_unused && has_changed) return;  // has to be looked for each time
  options.find_unused_parameters = false;
  options.static_graph = has_unused;
  build();
}

}  // namespace tessera::data_parallel
