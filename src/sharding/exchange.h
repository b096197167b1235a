// src/sharding/exchange.h — a collective and its conjugate, as two autograd nodes.

#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"

namespace tessera::sharding {

/// What is exchanged forward and back. Made for one call; shared by its nodes.
class Exchange {
 public:
  /// Waits for a collective under way, decodes and shapes what arrived.
  using Pending = std::function<at::Tensor()>;

  Exchange() = default;
  virtual ~Exchange() = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  /// Starts the collective on a detached input.
  virtual Pending start(const at::Tensor& input) = 0;
  /// Starts the conjugate on the gradient of the result; pending is the gradient of the input.
  virtual Pending start_backward(const at::Tensor& gradient) = 0;
};

// Note [Two nodes]
// The first node starts the exchange and returns a token; the second takes the token, waits and
// returns the result. Backward, the second node starts the reverse exchange and hands a token to
// the first, which waits for it. Autograd runs other nodes between the two, by order of creation:
// what was recorded between start and wait computes while the gradient travels.

/// Starts `exchange` on `input`.
comm::Awaitable<at::Tensor> run(std::shared_ptr<Exchange> exchange, const at::Tensor& input);

}  // namespace tessera::sharding
