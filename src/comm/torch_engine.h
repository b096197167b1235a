// src/comm/torch_engine.h — an engine of LibTorch's own that lives as long as a group of ours.

#pragma once

#include <exception>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "comm/own_process.h"

namespace tessera::comm {

/// Ends the engine, but only in the process that made it. In a forked child even the destructors of
/// NCCL and Gloo wait for threads that only the rank has, so there it is left alone for good.
class TorchEngine {
 public:
  explicit TorchEngine(c10::intrusive_ptr<c10d::Backend> engine) : engine_(std::move(engine)) {}
  TorchEngine(const TorchEngine&) = delete;
  TorchEngine& operator=(const TorchEngine&) = delete;
  ~TorchEngine() {
    if (maker_ != own_pid()) {
      static_cast<void>(engine_.release());
      return;
    }
    try {
      engine_->shutdown();  // else NCCL does the same with a warning that nobody has told it to
    } catch (const std::exception&) {
      // A device or a peer was lost, which has been told elsewhere.
    }
  }

 private:
  const pid_t maker_ = own_pid();
  c10::intrusive_ptr<c10d::Backend> engine_;
};

}  // namespace tessera::comm
