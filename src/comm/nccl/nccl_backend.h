// src/comm/nccl/nccl_backend.h — LibTorch's NCCL engine for CUDA tensors, where there is one.

#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::comm {

/// Whether this build knows NCCL.
bool has_nccl() noexcept;

/// Makes a ProcessGroupNCCL. It connects when it is first used, not here.
/// Throws ValueError if this build has no NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace tessera::comm
