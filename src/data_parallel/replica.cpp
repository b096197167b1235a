// A Replica's State between iterations: made, changed, reported on.

#include "tessera/data_parallel/replica.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "core/cores.h"
#include "data_parallel/names.h"
#include "data_parallel/replica_state.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/manifest.h"

namespace tessera::data_parallel {
namespace {

constexpr std::size_t kBroadcastBytes = 250U << 20;

double seconds(Moment from, Moment to) {
  return std::max(0.0, std::chrono::duration<double>(to - from).count());
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

}  // namespace

Replica::State::State(ModelParts model, const comm::Group& ranks, Options wishes)
    : options(std::move(wishes)), group(ranks), parts(std::move(model)) {
  check_arguments();
  if (options.automatic_graph) {
    options.find_unused_parameters = true;
    options.static_graph = false;
  }
  has_shared_memory_ = uses_shared_memory(group, kept.front().tensor.device());
  is_alone_ = group.size() == 1 && options.divisor.value_or(1) == 1;
  // Without a core to spare, a thread beside backward only takes turns with it. Where each rank may
  // find other parameters unused, orders differ, and blocking inside backward could close a circle
  // with collectives of the model's own.
  has_overlap_ = options.overlap.value_or(options.find_unused_parameters ||
                                          core::cores_left() >= 2 * group.size());

  const bool with_buffers =
      options.forward_sync_buffers ? true : options.broadcast_buffers.value_or(true);
  if (options.init_sync) {
    check_manifests(manifest_of(parts, options), group);
    broadcast_state(0, with_buffers);
  }
  current_buffers();
  register_parameters();
}

Replica::State::~State() {
  reducer.reset();
  std::lock_guard lock(live_parameters().mutex);
  for (const NamedParameter& parameter : reduced) {
    auto& counts = live_parameters().counts;
    const auto place = counts.find(parameter.tensor.unsafeGetTensorImpl());
    if (place != counts.end() && --place->second == 0) counts.erase(place);
  }
}

void Replica::State::start() {
  if (!options.delay_all_reduce_named_params.empty()) {
    delayed_.emplace(parts, options, [weak = weak_from_this()] {
      // At the end of the backward: the gradient of the trigger itself may be one of them.
      if (const auto self = weak.lock()) {
        torch::autograd::Engine::get_default_engine().queue_callback(
            [self] { self->delayed_->reduce(self->group, self->divisor()); });
      }
    });
  }
  if (!reduced.empty()) build();
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
  reducer.reset();
  places.reset();
  log = std::make_unique<ReplicaLog>(parts, reduced, group, options, syncs_forward_buffers());
  // Parameters that prove unused get zeros without anybody's asking, and batched copies come late.
  const bool can_place = options.direct_gradients && options.gradient_as_bucket_view &&
                         !options.find_unused_parameters && !options.batched_grad_copy &&
                         !is_alone_;
  if (can_place) places = std::make_unique<GradientPlaces>(reduced);
  BucketReducer::Calls calls;
  calls.reduce = [this](std::size_t index, at::Tensor& buffer) { return reduce(index, buffer); };
  calls.on_arrival = [this] {
    if (iteration_ && iteration_->begins_with_arrival) begin_backward(iteration_);
  };
  reducer =
      std::make_unique<BucketReducer>(reduced, options, group, *log, std::move(calls), is_alone_);
  if (places) places->attach(&reducer->buckets());
  log->set_buckets(reducer->buckets().bytes());
  if (user_hook_) announce_user_hook();
  hide_views();
}

bool Replica::State::divides_while_copying() const {
  return !has_shared_memory_ && !options.divisor && !user_hook_;
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
  if (is_alone_) {
    is_alone_ = false;
    return build();
  }
  announce_user_hook();
}

void Replica::State::announce_user_hook() {
  if (user_hook_->consumes_gradients()) reducer->set_consumed();
  log->set("comm_hook", user_hook_->name());
}

void Replica::State::register_buffer_hook(BufferHook hook, BufferHookPlace place) {
  TESSERA_CHECK_VALUE(hook, "register_buffer_hook: the hook is empty.");
  buffer_hook_ = std::move(hook);
  buffer_hook_place_ = place;
}

void Replica::State::set_static_graph() {
  if (options.static_graph) return;
  TORCH_CHECK(!has_had_forward_,
              "set_static_graph() should be called before training loop starts: after "
              "construction, before the first forward.");
  options.static_graph = true;
  options.automatic_graph = false;
  if (log) log->set("static_graph", 1);
}

void Replica::State::update_process_group(const comm::Group& ranks) {
  reset();
  group = ranks;
  has_shared_memory_ = uses_shared_memory(group, kept.front().tensor.device());
  if (!reducer) return;
  const bool was_alone = is_alone_;
  is_alone_ = group.size() == 1 && options.divisor.value_or(1) == 1 && !user_hook_;
  if (was_alone && !is_alone_) return build();
  reducer->set_group(group);
}

void Replica::State::reset() {
  works_.clear();
  iteration_.reset();
  has_failed_ = false;
  is_hook_step_open_ = false;
  if (places) places->close();
  if (user_hook_) user_hook_->reset();
  if (reducer) reducer->reset();
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

void Replica::State::sync_buffers_now() {
  if (buffer_hook_) {
    run_buffer_hook(/*is_shadow=*/true);
  } else {
    sync_buffers(0);
  }
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
  reducer->wait_also_for(futures);
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
  const std::vector<std::int64_t> bytes = reducer->buckets().bytes();
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
