// src/comm/engines.h — which devices a process group has an engine for.

#pragma once

#include <algorithm>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "tessera/comm/group.h"

namespace tessera::comm {

class EngineBackend;

inline bool has_engine_for(const c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [device](const c10::Device& known) { return known.type() == device; });
}

/// Where sizes, hashes and texts that the library exchanges over `group` have to lie: in host
/// memory if it has an engine for that, else on the current GPU.
inline c10::Device message_device(const c10d::ProcessGroup& group) {
  return has_engine_for(group, c10::DeviceType::CPU) ? c10::DeviceType::CPU : c10::DeviceType::CUDA;
}

/// The engine that carries tensors in host memory, if it is one of ours: those compare what the
/// ranks call. Null otherwise.
EngineBackend* engine_of(const Group& group);

}  // namespace tessera::comm
