#include "data_parallel/replica_log.h"

#include <cstdlib>
#include <set>

#include <c10/util/Logging.h>
#include <c10/util/StringUtil.h>

#include "comm/gloo/gloo_backend.h"
#include "data_parallel/bucket_reducer.h"

namespace tessera::data_parallel {
namespace {

using Event = c10d::Timer::Event;

constexpr int kAlwaysSampled = 10;

struct Span {
  const char* name;
  Event from, to;
};
constexpr Span kSpans[] = {
    {"forward_compute_time", Event::kForwardStart, Event::kBackwardComputeStart},
    {"backward_compute_time", Event::kBackwardComputeStart, Event::kBackwardComputeEnd},
    {"backward_comm_time", Event::kBackwardCommStart, Event::kBackwardCommEnd},
    {"backward_compute_comm_overlap_time", Event::kBackwardCommStart, Event::kBackwardComputeEnd},
};
struct Instant {
  const char* name;
  Event event;
};
constexpr Instant kInstants[] = {
    {"forward_compute_time_start", Event::kForwardStart},
    {"backward_compute_time_start", Event::kBackwardComputeStart},
    {"backward_comm_time_start", Event::kBackwardCommStart},
    {"backward_compute_time_end", Event::kBackwardComputeEnd},
    {"backward_comm_time_end", Event::kBackwardCommEnd},
};

/// Under their own names in lower case, by the engine that reads them.
const std::vector<const char*> kVariables{"MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG",
                                          "CUDA_VISIBLE_DEVICES"};
const std::vector<const char*> kNcclVariables{
    "NCCL_SOCKET_IFNAME", "NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_DEBUG",         "NCCL_NTHREADS",      "NCCL_IB_TIMEOUT"};
const std::vector<const char*> kGlooVariables{"GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"};

}  // namespace

ReplicaLog::ReplicaLog(const ModelParts& parts, const std::vector<NamedParameter>& parameters,
                       const comm::Group& group, const Options& options, bool syncs_buffers)
    : parameters_(parameters) {
  std::set<c10::DeviceIndex> devices;
  std::set<std::string> types;
  std::int64_t bytes = 0;
  for (const NamedParameter& parameter : parameters) {
    devices.insert(parameter.tensor.device().index());
    types.emplace(parameter.tensor.dtype().name());
    bytes += static_cast<std::int64_t>(parameter.tensor.nbytes());
  }
  const c10::Device device = parameters.front().tensor.device();
  const bool is_on_several = devices.size() > 1;
  if (!device.is_cuda() || !is_on_several) {
    timer_ = c10d::TimerRegistry()->Create(device.type(), device);
  }
  std::vector<int> device_ids;
  for (const c10::Device& one : options.device_ids) device_ids.push_back(one.index());
  const std::string engine = group.process_group()->getBackendName();

  data_.strings = {{"module_name", parts.name},
                   {"dtypes", c10::Join(", ", types)},
                   {"device_ids", c10::Join(", ", device_ids)},
                   {"backend_name", engine}};
  data_.integers = {
      {"world_size", group.size()},
      {"rank", group.rank()},
      {"iteration", 0},
      {"is_multi_device_module", is_on_several},
      {"num_parameter_tensors", static_cast<std::int64_t>(parameters.size())},
      {"total_parameter_size_bytes", bytes},
      {"output_device", options.output_device ? options.output_device->index()
                                              : (device_ids.empty() ? -1 : device_ids.front())},
      {"broadcast_buffers", syncs_buffers},
      {"has_sync_bn", parts.has_sync_batch_norm},
      {"bucket_cap_bytes", bucket_limits(options).cap},
      {"find_unused_parameters", options.find_unused_parameters},
      {"gradient_as_bucket_view", options.gradient_as_bucket_view}};
  if (options.static_graph) set("static_graph", 1);

  const auto read = [this](const std::vector<const char*>& variables) {
    for (const std::string variable : variables) {
      std::string key = variable;
      for (char& letter : key) letter = static_cast<char>(std::tolower(letter));
      const char* value = std::getenv(variable.c_str());
      set(key, value != nullptr ? value : "N/A");
    }
  };
  read(kVariables);
  if (engine == "nccl") read(kNcclVariables);
  if (engine == "gloo") {
    read(kGlooVariables);
    const auto num_threads = comm::num_gloo_threads(group.process_group()->getBackend(at::kCPU));
    if (num_threads) set("gloo_num_threads", *num_threads);
  }
}

void ReplicaLog::set_buckets(const std::vector<std::int64_t>& bytes) {
  set("bucket_sizes", c10::Join(", ", bytes));
  publish();
}

bool ReplicaLog::is_sampled() const noexcept {
  return num_iterations_ > 0 &&
         (num_iterations_ <= kAlwaysSampled || num_iterations_ % sample_rate_ == 0);
}

void ReplicaLog::record(Event event) {
  if (timer_ && is_sampled()) timer_->record(event);
}

void ReplicaLog::begin_iteration(const BucketReducer& reducer) {
  if (is_sampled()) sample(reducer);
  ++num_iterations_;
  record(Event::kForwardStart);
}

void ReplicaLog::sample(const BucketReducer& reducer) {
  ++num_sampled_;
  set("iteration", num_iterations_);
  std::int64_t unused_bytes = 0;
  for (const std::size_t index : reducer.unused()) {
    unused_bytes += static_cast<std::int64_t>(parameters_[index].tensor.nbytes());
  }
  set("unused_parameter_size", unused_bytes);
  set("num_buckets_reduced", static_cast<std::int64_t>(reducer.num_reduced()));
  if ((data_.integers["has_rebuilt_buckets"] != 0) != reducer.has_rebuilt()) {
    set("has_rebuilt_buckets", reducer.has_rebuilt());
    set("rebuilt_bucket_sizes", c10::Join(", ", reducer.buckets().bytes()));
    std::vector<std::string> buckets;
    for (const auto& bucket : reducer.buckets().cut()) buckets.push_back(c10::Join(" ", bucket));
    set("rebuilt_per_bucket_param_indices", c10::Join(", ", buckets));
  }
  if (!reducer.order().empty()) {
    set("prev_iteration_grad_ready_order_indices", c10::Join(", ", reducer.order()));
  }
  if (timer_) {
    sample_times();
  } else {
    TORCH_WARN_ONCE("Cuda time stats are not collected for multi-device modules.");
  }
  publish();
}

void ReplicaLog::sample_times() {
  for (const Span& span : kSpans) {
    const auto nanoseconds = timer_->measureDifference(span.from, span.to);
    set(span.name, nanoseconds.value_or(0));
    std::int64_t& average = data_.integers[std::string("avg_") + span.name];
    if (nanoseconds) average = (*nanoseconds + average * (num_sampled_ - 1)) / num_sampled_;
  }
  for (const Instant& instant : kInstants) {
    set(instant.name, timer_->getTimestamp(instant.event).value_or(0));
  }
}

void ReplicaLog::set_error(const std::string& text) {
  set("has_error", 1);
  set("error", text);
  set("iteration", num_iterations_);
  publish();
}

void ReplicaLog::publish() const { at::LogPyTorchDDPUsage({data_.strings, data_.integers}); }

}  // namespace tessera::data_parallel
