// src/comm/gloo/gloo_backend.h — makes LibTorch's Gloo engine without showing Gloo to anyone.

#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::comm {

/// Makes a ProcessGroupGloo whose sockets are bound to `address`. Collective over its ranks.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& address);

/// How many threads LibTorch's Gloo engine works with; nothing for another engine.
std::optional<int> num_gloo_threads(const c10::intrusive_ptr<c10d::Backend>& engine);

}  // namespace tessera::comm
