// trainer/device.h — which GPU a rank trains on, and how full and busy it is.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <c10/core/Device.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/core/step_recorder.h"
#include "trainer/settings.h"

namespace tessera::trainer {

/// The device of this rank: the CPU, or GPU number LOCAL_RANK of those that the process sees; with
/// more ranks than GPUs they take turns. Not collective.
TESSERA_API c10::Device device_of(const Settings& settings);

/// Makes the rank's device the current one. Collective over `world`. Throws ValueError, the same on
/// all ranks, where --device cuda cannot be had: a CPU build of LibTorch, no GPU, or more ranks on
/// a host than GPUs without --share-gpus.
TESSERA_API void use_device(const Settings& settings, const comm::Group& world);

/// All memory of a GPU, whoever uses it, and how many of the ranks of a host share it, at most.
struct DeviceMemory {
  std::int64_t bytes = 0;
  int num_ranks = 1;
};
TESSERA_API DeviceMemory device_memory(c10::Device device, int ranks_per_host);

struct DeviceUse {
  std::int64_t own_bytes = 0;    // held by this process
  std::int64_t total_bytes = 0;  // 0: unknown
  std::optional<int> percent;    // of the last moments in which something ran; if NVML says so
};
TESSERA_API DeviceUse device_use(c10::Device device);
/// The most that this process has held.
TESSERA_API std::int64_t peak_device_bytes(c10::Device device);

/// What NVML says of a GPU, if it is installed; else no name and no bytes.
struct DeviceFacts {
  std::string name;
  std::int64_t total_bytes = 0;
  std::int64_t used_bytes = 0;  // by all processes
  int percent = -1;             // of the last moments in which something ran; -1: not told
};
TESSERA_API DeviceFacts device_facts(c10::Device device);

/// A clock for the lane of a GPU in the report's timeline; null for the CPU. Waits for the device.
TESSERA_API std::shared_ptr<core::DeviceClock> device_clock(c10::Device device);

/// The line of an error's text in which CUDA tells a fault of the device (it is lost, its memory is
/// damaged, a kernel failed): nothing more can be done on it by this process. Empty: no such line.
TESSERA_API std::string device_fault(std::string_view text);

/// "NVIDIA H200, 150 GB"; without NVML the device's number alone.
TESSERA_API std::string device_name(c10::Device device);

}  // namespace tessera::trainer
