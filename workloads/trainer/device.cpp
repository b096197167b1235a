#include "trainer/device.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "report/html.h"
#include "report/rank_log.h"
#include "tessera/comm/environment.h"
#include "tessera/core/check.h"
#include "tessera/core/version.h"
#include "trainer/nvml.h"

namespace tessera::trainer {
namespace {

namespace report = workloads::report;

std::string wrong_with_device(const Settings& settings) {
  const std::string way_out = "; or leave --device out";
  if (!at::hasCUDA() && !at::Context::hasCUDART()) {
    return "LibTorch " + torch_version() + " is a build for CPUs. Build against one with CUDA" +
           way_out;
  }
  const auto num_gpus = static_cast<int>(at::getNumGPUs());
  if (num_gpus == 0) {
    return "CUDA finds no GPU on this host. Ask tessera doctor, and look at CUDA_VISIBLE_DEVICES" +
           way_out;
  }
  const int ranks = comm::read_environment().local_world_size;
  if (ranks <= num_gpus || settings.share_gpus) return "";
  const std::string seen = std::to_string(num_gpus) + (num_gpus == 1 ? " GPU" : " GPUs");
  return std::to_string(ranks) + " ranks of this host see " + seen + ". Use --ranks " +
         std::to_string(num_gpus) +
         ", or --share-gpus: ranks that share a GPU talk through host memory, not over NCCL";
}

// CUDA's runtime is in the process if LibTorch was built with it; asked by name, so that one source
// serves every build.
std::string pci_address(c10::Device device) {
  using Get = int (*)(char*, int, int);
  auto* const get = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "cudaDeviceGetPCIBusId"));
  char text[32] = "";
  if (get == nullptr || get(text, sizeof(text), device.index()) != 0) return "";
  return text;
}

c10::CachingDeviceAllocator::DeviceStats allocator_stats(c10::Device device) {
  c10::DeviceAllocator* const allocator = c10::getDeviceAllocator(device.type());
  if (!allocator->initialized()) return {};
  return allocator->getDeviceStats(device.index());
}

/// Events of the current stream, and the time between them.
class StreamClock : public core::DeviceClock {
 public:
  explicit StreamClock(c10::Device device) : device_(device) {
    StreamClock::mark();
    events_.front().synchronize();
    begin_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count();
  }

  std::size_t mark() override {
    const std::lock_guard lock(mutex_);
    events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);  // with its time
    events_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return events_.size() - 1;
  }

  std::int64_t time_ns(std::size_t mark) override {
    const std::lock_guard lock(mutex_);
    c10::Event& event = events_.at(mark);
    event.synchronize();
    return begin_ns_ + static_cast<std::int64_t>(1e6 * events_.front().elapsedTime(event));
  }

 private:
  c10::Device device_;
  std::mutex mutex_;
  std::deque<c10::Event> events_;
  std::int64_t begin_ns_ = 0;
};

}  // namespace

std::shared_ptr<core::DeviceClock> device_clock(c10::Device device) {
  return device.is_cuda() ? std::make_shared<StreamClock>(device) : nullptr;
}

c10::Device device_of(const Settings& settings) {
  if (settings.device != "cuda") return at::kCPU;
  const int num_gpus = std::max(1, static_cast<int>(at::getNumGPUs()));
  return {at::kCUDA, static_cast<c10::DeviceIndex>(comm::read_environment().local_rank % num_gpus)};
}

void use_device(const Settings& settings, const comm::Group& world) {
  if (settings.device != "cuda") return;
  const auto wrong = report::gather_texts(wrong_with_device(settings), world);
  for (std::size_t rank = 0; rank < wrong.size(); ++rank) {
    TESSERA_CHECK_VALUE(wrong[rank].empty(), "train: --device cuda is not possible on rank ", rank,
                        ": ", wrong[rank], ".");
  }
  c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(device_of(settings));
}

DeviceMemory device_memory(c10::Device device, int ranks_per_host) {
  const auto total = c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index()).second;
  const int num_gpus = std::max(1, static_cast<int>(at::getNumGPUs()));
  return {static_cast<std::int64_t>(total), (ranks_per_host + num_gpus - 1) / num_gpus};
}

DeviceFacts device_facts(c10::Device device) {
  DeviceFacts facts;
  if (!device.is_cuda()) return facts;
  if (const auto known = gpu_at(pci_address(device))) {
    facts = {known->name, known->total_bytes, known->used_bytes, known->percent};
  }
  return facts;
}

std::string device_fault(std::string_view text) {
  for (const std::string_view begin : {"CUDA error: ", "CUDA driver error: "}) {
    const std::size_t found = text.find(begin);
    if (found == std::string_view::npos) continue;
    std::string line(text.substr(found + begin.size()));
    line = line.substr(0, line.find('\n'));
    return line.empty() ? "unknown error" : line;
  }
  return "";
}

DeviceUse device_use(c10::Device device) {
  DeviceUse use;
  if (!device.is_cuda()) return use;
  use.own_bytes = allocator_stats(device).reserved_bytes[0].current;
  const DeviceFacts facts = device_facts(device);
  use.total_bytes = facts.total_bytes;
  if (facts.percent >= 0) use.percent = facts.percent;
  return use;
}

std::int64_t peak_device_bytes(c10::Device device) {
  return device.is_cuda() ? allocator_stats(device).reserved_bytes[0].peak : 0;
}

std::string device_name(c10::Device device) {
  const DeviceFacts facts = device_facts(device);
  if (facts.name.empty()) return device.str();
  return facts.name + ", " + report::bytes_text(static_cast<double>(facts.total_bytes));
}

}  // namespace tessera::trainer
