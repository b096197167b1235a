// trainer/host_copy.h — numbers of a GPU in host memory, read when they are needed.

#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include "tessera/core/export.h"

namespace tessera::trainer {

/// A tensor's copy in host memory. On a GPU it is begun behind the work that makes the tensor, and
/// the host waits only where it reads.
class TESSERA_API HostCopy {
 public:
  /// What an earlier call copied is overwritten.
  void start(const at::Tensor& tensor);
  bool is_started() const noexcept { return host_.defined(); }
  /// Throws what LibTorch says if the device has failed.
  const at::Tensor& wait();

 private:
  at::Tensor host_;
  std::optional<c10::Event> done_;
};

}  // namespace tessera::trainer
