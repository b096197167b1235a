// src/graph_parallel/device_copies.h — a constant tensor, copied to each device once.

#pragma once

#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::graph_parallel::detail {

/// Copying an index to the device in every layer would wait for the host each time.
class DeviceCopies {
 public:
  /// Returns `tensor`, which never changes and is always the same one, on `device`. Any thread.
  at::Tensor of(const at::Tensor& tensor, at::Device device) const {
    if (tensor.device() == device) return tensor;
    const std::lock_guard lock(mutex_);
    for (const at::Tensor& copy : copies_) {
      if (copy.device() == device) return copy;
    }
    copies_.push_back(tensor.to(device));
    return copies_.back();
  }

 private:
  mutable std::mutex mutex_;
  mutable std::vector<at::Tensor> copies_;
};

}  // namespace tessera::graph_parallel::detail
