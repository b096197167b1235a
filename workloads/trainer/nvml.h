// trainer/nvml.h — what NVIDIA's management library says of a GPU, where it is installed. Loaded
// when first asked, never linked. No LibTorch.

#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace tessera::trainer {

struct GpuFacts {
  std::string name;
  std::int64_t total_bytes = 0;
  std::int64_t used_bytes = 0;  // by all processes
  int percent = -1;             // of the last moments in which something ran; -1: not told
};

/// The GPU at a PCI address such as 0000:1b:00.0; nothing without the library, or if it does not
/// know it.
std::optional<GpuFacts> gpu_at(const std::string& pci_address);

/// The newest CUDA that the driver can run, as 13000 for 13.0; 0 if unknown.
int driver_cuda_version();

}  // namespace tessera::trainer
