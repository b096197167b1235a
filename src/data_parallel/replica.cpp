#include "tessera/data_parallel/replica.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "comm/backend.h"
#include "data_parallel/replica_state.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/manifest.h"

namespace tessera::data_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Engine;
using torch::autograd::variable_list;

constexpr std::size_t kBroadcastBytes = 250U << 20;
constexpr int kWatchedIterations = 5;
constexpr std::size_t kMaxNames = 20;

Moment now() { return std::chrono::steady_clock::now(); }
double seconds(Moment from, Moment to) {
  return std::max(0.0, std::chrono::duration<double>(to - from).count());
}

bool is_listed(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Cores this process may run on.
int num_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// LibTorch's Reducer puts buckets into memory of the backend only if this variable says so, and it
// asks for the variable each time. Whoever sets it has the last word.
void put_buckets_into_shared_memory() {
  static std::once_flag once;
  std::call_once(once, [] { ::setenv("DDP_DISABLE_COMM_MEM", "0", /*overwrite=*/0); });
}

// Parameters that some Replica of this process reduces.
struct LiveParameters {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, int> counts;
};
LiveParameters& live_parameters() {
  static auto* instance = new LiveParameters;  // models may outlive static destructors
  return *instance;
}

c10d::Backend* engine_of(const comm::Group& group, c10::Device device) {
  if (!device.is_cpu()) return nullptr;
  try {
    return dynamic_cast<comm::EngineBackend*>(
        group.process_group()->getBackend(c10::DeviceType::CPU).get());
  } catch (const c10::Error&) {
    return nullptr;  // a group without an engine for CPU tensors
  }
}

// The reducer's only hook: which hook runs, and on which group, is decided anew for each bucket.
class ForwardingHook final : public c10d::CommHookInterface {
 public:
  explicit ForwardingHook(Replica::State* state) : state_(state) {}
  FuturePtr runHook(c10d::GradBucket& bucket) override { return state_->reduce(bucket); }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  Replica::State* state_;  // owns the reducer, which owns this
};

// Passes outputs on through one node, which hands undefined gradients through: what only an ignored
// output depends on then still reports to the reducer, without a gradient. Copies, because a loss
// may change its input in place.
class Sink : public torch::autograd::Function<Sink> {
 public:
  static variable_list forward(AutogradContext* context, at::TensorList outputs) {
    context->set_materialize_grads(false);
    variable_list result;
    result.reserve(outputs.size());
    for (const at::Tensor& output : outputs) result.push_back(output.clone());
    return result;
  }
  static variable_list backward(AutogradContext*, variable_list gradients) { return gradients; }
};

}  // namespace

Replica::State::State(ModelParts model, const comm::Group& ranks, Options wishes)
    : options(std::move(wishes)), group(ranks), parts(std::move(model)) {
  check_arguments();
  if (options.automatic_graph) {
    options.find_unused_parameters = true;
    options.static_graph = false;
  }
  is_own_engine_ = engine_of(group, kept.front().tensor.device()) != nullptr;
  is_alone_ = group.size() == 1 && options.divisor.value_or(1) == 1;
  // Without a core to spare, a thread beside backward only takes turns with it. Where each rank may
  // find other parameters unused, orders differ, and blocking inside backward could close a circle
  // with collectives of the model's own.
  has_overlap_ =
      options.overlap.value_or(options.find_unused_parameters || num_cores() >= 2 * group.size());
  if (is_own_engine_) put_buckets_into_shared_memory();

  const bool with_buffers =
      options.forward_sync_buffers ? true : options.broadcast_buffers.value_or(true);
  if (options.init_sync) {
    check_manifests(manifest_of(parts, options), group, kept.front().tensor.device());
    broadcast_state(0, with_buffers);
  }
  current_buffers();
  register_parameters();
}

Replica::State::~State() {
  logger.reset();
  reducer.reset();
  std::lock_guard lock(live_parameters().mutex);
  for (const NamedParameter& parameter : reduced) {
    auto& counts = live_parameters().counts;
    const auto place = counts.find(parameter.tensor.unsafeGetTensorImpl());
    if (place != counts.end() && --place->second == 0) counts.erase(place);
  }
}

void Replica::State::start() {
  delay_parameters();
  if (!reduced.empty()) build();
}

void Replica::State::check_arguments() {
  const bool has_delayed = !options.delay_all_reduce_named_params.empty();
  TESSERA_CHECK_VALUE(has_delayed == options.param_to_hook_all_reduce.has_value(),
                      "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set "
                      "at the same time.");
  for (const NamedParameter& parameter : parts.parameters) {
    if (is_listed(options.ignored, parameter.name)) continue;
    kept.push_back(parameter);
    if (is_listed(options.delay_all_reduce_named_params, parameter.name)) continue;
    (parameter.tensor.requires_grad() ? reduced : frozen).push_back(parameter);
  }
  TORCH_CHECK(!reduced.empty() || has_delayed,
              "DistributedDataParallel is not needed when a module doesn't have any parameter that "
              "requires a gradient.");
  TESSERA_CHECK_VALUE(options.device_ids.size() <= 1,
                      "device_ids can only be None or contain a single element.");

  std::set<std::string> types;
  std::set<std::string> devices;
  for (const NamedParameter& parameter : kept) {
    types.insert(c10::DeviceTypeName(parameter.tensor.device().type(), /*lower_case=*/true));
    devices.insert(parameter.tensor.device().str());
  }
  const auto listed = [](const std::set<std::string>& names) {
    std::string text = "{";
    for (const std::string& name : names) text.append(text.size() > 1 ? ", " : "").append(name);
    return text.append("}");
  };
  TESSERA_CHECK_VALUE(types.size() == 1,
                      "DistributedDataParallel's input module must be on the same type of devices, "
                      "but input module parameters locate in ",
                      listed(types), ".");
  const bool is_gpu = *types.begin() != "cpu";
  if (!is_gpu || devices.size() > 1) {
    TESSERA_CHECK_VALUE(options.device_ids.empty() && !options.output_device,
                        "DistributedDataParallel device_ids and output_device arguments only work "
                        "with single-device/multiple-device GPU modules or CPU modules, but got "
                        "device_ids of ",
                        options.device_ids.size(), ", output_device ",
                        options.output_device ? options.output_device->str() : "none",
                        ", and module parameters ", listed(devices), ".");
  }
  TORCH_CHECK(!parts.has_uninitialized,
              "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
              "Run a dummy forward pass to correctly initialize the modules");
  TESSERA_CHECK_VALUE(!parts.has_sync_batch_norm || is_gpu,
                      "SyncBatchNorm layers only work with GPU modules");
  for (const NamedParameter& parameter : reduced) {
    TESSERA_CHECK_VALUE(parameter.tensor.is_leaf(), "DistributedDataParallel: '", parameter.name,
                        "' is the result of a computation; a parameter must be a leaf.");
  }
  if (options.bucket_cap_mb) {
    TESSERA_CHECK_VALUE(*options.bucket_cap_mb > 0, "DistributedDataParallel: bucket_cap_mb is ",
                        *options.bucket_cap_mb, ", it must be positive.");
  }
  for (const double size : options.bucket_cap_mb_list) {
    TESSERA_CHECK_VALUE(size > 0, "DistributedDataParallel: bucket_cap_mb_list contains ", size,
                        ", sizes must be positive.");
  }
  TESSERA_CHECK_VALUE(options.bucket_cap_mb_list.empty() || !options.bucket_cap_mb,
                      "DistributedDataParallel: give bucket_cap_mb or bucket_cap_mb_list, not "
                      "both.");
  TESSERA_CHECK_VALUE(!options.divisor || *options.divisor > 0,
                      "DistributedDataParallel: the divisor is ", *options.divisor,
                      ", it must be positive.");
}

void Replica::State::register_parameters() {
  std::lock_guard lock(live_parameters().mutex);
  bool has_warned = false;
  for (const NamedParameter& parameter : reduced) {
    const int count = ++live_parameters().counts[parameter.tensor.unsafeGetTensorImpl()];
    if (count > 1 && !has_warned) {
      has_warned = true;
      TORCH_WARN("DistributedDataParallel: '", parameter.name,
                 "' is wrapped already by another DistributedDataParallel that is still alive. Its "
                 "gradient would be reduced twice; let go of the other one first.");
    }
  }
}

void Replica::State::build() {
  reducer = make_reducer(reduced, group, options);
  logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  std::vector<int> device_ids;
  for (const c10::Device& device : options.device_ids) device_ids.push_back(device.index());
  const int output_device = options.output_device ? options.output_device->index()
                                                  : (device_ids.empty() ? -1 : device_ids.front());
  logger->set_construction_data_and_log(parts.name, device_ids, output_device,
                                        syncs_forward_buffers(), parts.has_sync_batch_norm,
                                        options.static_graph);
  if (options.static_graph) {
    reducer->set_static_graph();
    logger->set_static_graph();
  }
  has_hook_ = false;
  is_first_static_done_ = false;
  if (is_own_engine_ || options.divisor || user_hook_) attach_hook();
  if (user_hook_) announce_user_hook();
}

void Replica::State::attach_hook() {
  if (has_hook_) return;
  reducer->register_comm_hook(std::make_unique<ForwardingHook>(this));
  has_hook_ = true;
}

void Replica::State::register_comm_hook(std::shared_ptr<CommHook> hook) {
  TESSERA_CHECK_VALUE(hook, "register_comm_hook: the hook is null.");
  TORCH_CHECK(!user_hook_,
              "register_comm_hook or register_builtin_comm_hook can only be called once.");
  TORCH_CHECK(reducer, "register_comm_hook: all parameters are delayed, there are no buckets.");
  TORCH_CHECK(!has_had_sync_,
              "register_comm_hook: a backward has run already. Register hooks before the first "
              "iteration.");
  user_hook_ = std::move(hook);
  is_alone_ = false;
  attach_hook();
  announce_user_hook();
}

void Replica::State::announce_user_hook() {
  if (user_hook_->consumes_gradients()) reducer->set_optimizer_in_backward();
  logger->set_comm_hook(user_hook_->name());
}

void Replica::State::register_buffer_hook(BufferHook hook, BufferHookPlace place) {
  TESSERA_CHECK_VALUE(hook, "register_buffer_hook: the hook is empty.");
  buffer_hook_ = std::move(hook);
  buffer_hook_place_ = place;
}

void Replica::State::set_static_graph() {
  if (options.static_graph) return;
  TORCH_CHECK(!has_had_forward_,
              "set_static_graph() should be called before the training loop starts: after "
              "construction, before the first forward.");
  options.static_graph = true;
  options.automatic_graph = false;
  if (!reducer) return;
  reducer->set_static_graph();
  logger->set_static_graph();
}

void Replica::State::update_process_group(const comm::Group& ranks) {
  reset();
  group = ranks;
  is_own_engine_ = engine_of(group, kept.front().tensor.device()) != nullptr;
  if (!reducer) return;
  reducer->update_process_group(group.process_group());
  is_alone_ = group.size() == 1 && options.divisor.value_or(1) == 1 && !user_hook_;
}

void Replica::State::reset() {
  works_.clear();
  iteration_.reset();
  has_failed_ = false;
  is_hook_step_open_ = false;
  if (user_hook_) user_hook_->reset();
  if (reducer) reducer->reset_state();
}

double Replica::State::divisor() const noexcept {
  return join_divisor_.value_or(options.divisor.value_or(group.size()));
}

bool Replica::State::syncs_forward_buffers() const {
  return options.forward_sync_buffers.value_or(options.broadcast_buffers.value_or(true));
}

std::vector<NamedTensor> Replica::State::current_buffers() {
  if (!parts.buffers) return {};
  std::vector<NamedTensor> buffers = parts.buffers();
  if (!options.ignored.empty()) {
    std::erase_if(buffers,
                  [&](const NamedTensor& b) { return is_listed(options.ignored, b.name); });
  }
  num_buffers_ = buffers.size();
  return buffers;
}

void Replica::State::broadcast_state(int source, bool with_buffers) {
  if (group.size() == 1) return;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : kept) tensors.push_back(parameter.tensor.detach());
  if (with_buffers) {
    for (const NamedTensor& buffer : current_buffers()) tensors.push_back(buffer.tensor.detach());
  }
  if (!tensors.empty()) {
    c10d::broadcast_coalesced(group.process_group(), tensors, kBroadcastBytes, source);
  }
}

void Replica::State::sync_buffers(int source) {
  std::vector<at::Tensor> tensors;
  for (const NamedTensor& buffer : current_buffers()) tensors.push_back(buffer.tensor.detach());
  if (tensors.empty() || group.size() == 1) return;
  at::NoGradGuard no_grad;
  // Below the layer that counts versions: a graph made before may still need these buffers.
  at::AutoDispatchBelowADInplaceOrView guard;
  c10d::broadcast_coalesced(group.process_group(), tensors, kBroadcastBytes, source);
}

void Replica::State::run_buffer_hook(bool is_shadow) {
  std::map<std::string, at::Tensor> buffers;
  for (const NamedTensor& buffer : current_buffers()) buffers[buffer.name] = buffer.tensor;
  const auto futures = buffer_hook_(buffers);
  if (futures.empty()) return;
  if (is_shadow || !reducer || !at::GradMode::is_enabled() || !require_backward_grad_sync) {
    for (const auto& future : futures) future->waitAndThrow();
    return;
  }
  c10::List<FuturePtr> list(c10::FutureType::create(c10::TensorType::get()));
  for (const auto& future : futures) list.push_back(future);
  reducer->install_futures(list);
}

void Replica::State::before_forward(const JoinOptions* join) {
  has_had_forward_ = true;
  if (!reducer) return;
  const bool has_gradients = at::GradMode::is_enabled();
  const bool has_sync = has_gradients && require_backward_grad_sync;
  if (has_failed_) reset();
  if (iteration_ && has_gradients && reducer->is_unfinished()) {
    // A backward that an exception ended has not failed us.
    if (iteration_->has_begun && !iteration_->has_ended) {
      reset();
    } else {
      throw_unfinished();
    }
  }
  if (has_gradients) check_frozen();
  if (is_alone_ && join == nullptr) return;
  timeline_.forward_begin = now();
  if (has_sync) {
    logger->set_runtime_stats_and_log();
    reducer->prepare_for_forward();
  }
  // Buffers are left alone without gradients, so that one rank may evaluate by itself.
  const bool has_buffers = has_gradients && require_forward_param_sync_ &&
                           (buffer_hook_ ? buffer_hook_place_ == BufferHookPlace::kPreForward
                                         : syncs_forward_buffers() && num_buffers_ > 0);
  join_divisor_.reset();
  int source = 0;
  if (join != nullptr) {
    logger->set_uneven_input_join();
    const Control control = exchange_control(/*is_active=*/true, has_buffers);
    set_join_divisor(control.num_active, *join);
    source = control.source;
  }
  if (has_gradients) {
    if (options.automatic_graph && num_watched_ == kWatchedIterations) choose_graph();
    reducer->complete_arrival_order();
    reducer->rebuild_buckets();
  }
  if (has_buffers) {
    if (buffer_hook_) {
      run_buffer_hook(/*is_shadow=*/false);
    } else {
      sync_buffers(source);
    }
  }
}

std::vector<at::Tensor> Replica::State::after_forward(std::vector<at::Tensor> outputs) {
  const bool has_gradients = at::GradMode::is_enabled();
  const bool has_sync = has_gradients && require_backward_grad_sync;
  has_delayed_sync_ = has_sync;
  if (has_gradients && !delayed_.empty()) point_delayed_gradients();
  if (!reducer) return outputs;
  if (is_alone_) return outputs;

  if (has_gradients && buffer_hook_ && buffer_hook_place_ == BufferHookPlace::kPostForward) {
    run_buffer_hook(/*is_shadow=*/false);
  }
  if (!has_sync) {
    if (has_gradients) require_forward_param_sync_ = false;
    return outputs;
  }
  require_forward_param_sync_ = true;
  const bool is_first_static = options.static_graph && !is_first_static_done_;
  if (is_first_static) reducer->restart_hook_counts();
  const bool finds_unused = options.find_unused_parameters && !options.static_graph;
  std::vector<at::Tensor> searched;
  if (finds_unused) {
    for (const at::Tensor& output : outputs) {
      if (output.defined()) searched.push_back(output);
    }
  }
  reducer->prepare_for_backward(searched);
  if (!has_hook_ && join_divisor_) reducer->set_divisor(static_cast<int>(*join_divisor_));
  reducer->watch_arrivals();
  has_had_sync_ = true;
  timeline_.forward_end = now();
  timeline_.num_buckets = 0;

  if (finds_unused) {
    std::vector<at::Tensor> passed;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].defined() && outputs[i].grad_fn()) {
        passed.push_back(outputs[i]);
        places.push_back(i);
      }
    }
    if (!passed.empty()) {
      const variable_list sunk = Sink::apply(at::TensorList(passed));
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
    const std::size_t index = iteration->num_outputs++;
    // Whoever holds an output may still run backward, with or without the wrapper.
    output.register_hook([self = shared_from_this(), iteration, index](const at::Tensor&) {
      if (!iteration->has_gradient[index]) {
        iteration->has_gradient[index] = true;
        ++iteration->num_with_gradient;
      }
      if (iteration->is_watched) return;
      iteration->is_watched = true;
      iteration->has_begun = true;
      iteration->has_ended = false;
      if (iteration->is_first_static) self->end_first_static_backward();
      // Twice, to come after the reducer's callback.
      Engine::get_default_engine().queue_callback([self, iteration] {
        if (self->options.automatic_graph) self->note_usage();
        Engine::get_default_engine().queue_callback(
            [self, iteration] { self->end_backward(iteration); });
      });
    });
  }
  iteration->has_gradient.assign(iteration->num_outputs, false);
}

void Replica::State::end_backward(const std::shared_ptr<Iteration>& iteration) {
  iteration->is_watched = false;
  iteration->has_ended = true;
  timeline_.end = now();
  works_.clear();
  if (options.gradient_as_bucket_view && has_had_sync_) {
    // The same memory without being a view of it for autograd: torch::optim's zero_grad detaches
    // gradients in place, which views refuse.
    for (const NamedParameter& parameter : reduced) {
      at::Tensor& gradient = parameter.tensor.mutable_grad();
      if (gradient.defined() && gradient.is_view()) gradient = gradient.tensor_data();
    }
  }
  if (iteration != iteration_ || !options.check_finalized) return;
  if (reducer->is_unfinished() && iteration->num_with_gradient == iteration->num_outputs) {
    throw_unfinished();
  }
}

void Replica::State::check_finalized() {
  if (reducer && reducer->is_unfinished()) throw_unfinished();
}

void Replica::State::throw_unfinished() {
  const std::vector<std::size_t> missing = reducer->missing();
  std::string names;
  for (std::size_t i = 0; i < missing.size() && i < kMaxNames; ++i) {
    names.append(i > 0 ? ", " : "").append(reduced[missing[i]].name);
  }
  if (missing.size() > kMaxNames) {
    names.append(" and ").append(std::to_string(missing.size() - kMaxNames)).append(" more");
  }
  std::string text = "Expected to have finished reduction in this iteration, but on rank ";
  text.append(std::to_string(group.rank()))
      .append(" ")
      .append(std::to_string(missing.size()))
      .append(" of ")
      .append(std::to_string(reduced.size()))
      .append(" parameters of ")
      .append(parts.name)
      .append(" got no gradient in backward: ")
      .append(names)
      .append(
          ". If the loss is not meant to depend on them, set find_unused_parameters, or "
          "static_graph if they are the same in every iteration; otherwise look for outputs that "
          "the loss does not use.");
  logger->set_error_and_log(text);
  has_failed_ = true;
  TORCH_CHECK(false, text);
}

void Replica::State::check_frozen() const {
  for (const NamedParameter& parameter : frozen) {
    TORCH_CHECK(!parameter.tensor.requires_grad(), "DistributedDataParallel: '", parameter.name,
                "' did not require a gradient when the module was wrapped, and does now. Its "
                "gradient would stay local; wrap the module again.");
  }
}

FuturePtr Replica::State::average(at::Tensor& buffer) {
  std::vector<at::Tensor> tensors{buffer};
  c10d::AllreduceOptions call;
  const double ranks = divisor();
  if (is_own_engine_ && ranks == group.size() && !buffer.is_sparse() &&
      buffer.is_floating_point()) {
    call.reduceOp = c10d::ReduceOp::AVG;
  } else {
    buffer.div_(ranks);
  }
  call.asyncOp = has_overlap_ || !is_own_engine_;
  auto work = group.process_group()->allreduce(tensors, call);
  if (has_overlap_ && is_own_engine_) works_.push_back(work);  // whoever waits for it helps
  return work->getFuture();
}

FuturePtr Replica::State::reduce(c10d::GradBucket& grad_bucket) {
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
    if (!user_hook_) return average(grad_bucket.getBufferRef());

    const BucketPlace place = reducer->place_of(grad_bucket);
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters;
    for (const std::size_t index : place.parameters) {
      names.push_back(reduced[index].name);
      parameters.push_back(reduced[index].tensor);
    }
    Bucket bucket(place.index, place.is_last, grad_bucket.getBuffer(), std::move(names),
                  std::move(parameters), group, divisor());
    is_hook_step_open_ = true;
    FuturePtr future = user_hook_->reduce(bucket);
    if (place.is_last) end_hook_step();
    return future;
  } catch (...) {
    has_failed_ = true;
    throw;
  }
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

void Replica::State::end_first_static_backward() {
  if (is_first_static_done_) return;
  is_first_static_done_ = true;
  Engine::get_default_engine().queue_callback(
      [self = shared_from_this()] { self->reducer->delay_all_reduce(); });
}

void Replica::State::note_usage() {
  if (!options.find_unused_parameters || num_watched_ >= kWatchedIterations) return;
  const at::Tensor used = reducer->used_map();
  if (!used.all().item<bool>()) has_unused_ = true;
  if (last_used_.defined() && !last_used_.equal(used)) has_changed_ = true;
  last_used_ = used;
  ++num_watched_;
}

void Replica::State::choose_graph() {
  ++num_watched_;  // once
  const std::vector<std::int64_t> words{has_unused_ ? 1 : 0, has_changed_ ? 1 : 0};
  at::Tensor flags = at::tensor(words, at::kLong).to(kept.front().tensor.device());
  comm::all_reduce_(flags, group, comm::Reduction::kMax);
  const bool has_unused = flags[0].item<std::int64_t>() != 0;
  const bool has_changed = flags[1].item<std::int64_t>() != 0;
  if (has_unused && has_changed) return;  // has to be looked for each time
  options.find_unused_parameters = false;
  options.static_graph = has_unused;
  logger.reset();
  reducer.reset();
  build();
}

OverlapReport Replica::State::overlap_report() const {
  OverlapReport report;
  if (!reducer || timeline_.num_buckets == 0 || timeline_.end < timeline_.last_bucket) {
    return report;
  }
  report.forward = seconds(timeline_.forward_begin, timeline_.forward_end);
  report.backward = seconds(timeline_.forward_end, timeline_.last_bucket);
  report.exposed_comm = seconds(timeline_.last_bucket, timeline_.end);
  report.comm = seconds(timeline_.first_bucket, timeline_.end);
  report.num_buckets = timeline_.num_buckets;
  const std::vector<std::int64_t> bytes = reducer->bucket_bytes();
  for (const std::int64_t bucket : bytes) report.bytes += bucket;
  const double step = report.forward + report.backward + report.exposed_comm;
  if (report.exposed_comm < 0.1 * step || bytes.empty()) return report;
  const double last = static_cast<double>(bytes.back()) / (1 << 20);
  char text[256];
  if (report.num_buckets == 1) {
    std::snprintf(text, sizeof(text),
                  "%.0f%% of the step waits for one bucket of %.1f MiB; try bucket_cap_mb = %.2g.",
                  100 * report.exposed_comm / step, last, std::max(0.25, last / 8));
  } else {
    std::snprintf(text, sizeof(text),
                  "%.0f%% of the step waits for the last of %lld buckets (%.1f MiB in it); try a "
                  "smaller bucket_cap_mb, or no_sync to reduce less often.",
                  100 * report.exposed_comm / step, static_cast<long long>(report.num_buckets),
                  last);
  }
  report.advice = text;
  return report;
}

}  // namespace tessera::data_parallel
