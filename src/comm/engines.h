// src/comm/engines.h — which devices a process group has an engine for.

#pragma once

#include <algorithm>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera::comm {

inline bool has_engine_for(const c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [device](const c10::Device& known) { return known.type() == device; });
}

}  // namespace tessera::comm
