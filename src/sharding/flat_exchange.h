// src/sharding/flat_exchange.h — flat values to all ranks, with the gradient coming back.

#pragma once

#include "sharding/exchange.h"
#include "tessera/comm/codec.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {

/// Elements that `counts` values become on the wire.
Sizes wire_sizes(const Sizes& counts, const comm::Codec& codec);

/// What gradients of an exchange over `group` are multiplied with, at this moment.
double gradient_factor(const comm::Group& group);

/// Flat values, cut into `send`, become flat values cut into `receive`.
Exchange::Pending all_to_all_flat(const at::Tensor& values, const Sizes& send, const Sizes& receive,
                                  const comm::Codec& codec, const comm::Group& group);

/// Sends `sent[r]` of the flat values to rank r and returns `received[r]` of each rank r, in rank
/// order. The gradient travels back and is multiplied with `factor`. Collective, forward and
/// backward, also for a rank that has nothing. A group of one rank sends nothing. `meanwhile` is
/// done piece by piece while this rank would wait.
comm::Awaitable<at::Tensor> exchange_flat(const at::Tensor& values, Sizes sent, Sizes received,
                                          const comm::Group& group, const comm::Codecs& codecs,
                                          double factor, Exchange::Meanwhile meanwhile = nullptr);

}  // namespace tessera::sharding
