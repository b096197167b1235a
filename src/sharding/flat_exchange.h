// src/sharding/flat_exchange.h — flat values to all ranks, with the gradient coming back.

#pragma once

#include <functional>
#include <memory>
#include <vector>

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

/// Rows of a rank's own samples that are not looked up yet, of all exchanges of a collection. They
/// are those of the tables as they were when the exchange began: `read_all` comes before any step.
class UnreadRows {
 public:
  /// Writes a piece of them into the tensor of all, and returns true; false if nothing is left.
  using Read = std::function<bool(const at::Tensor&)>;
  struct Rows {
    at::Tensor output;
    Read read;
    void read_all() const {
      while (read(output)) {
      }
    }
  };

  std::shared_ptr<const Rows> add(at::Tensor output, Read read);
  /// Of the exchanges that somebody still waits for.
  void read_all();

 private:
  std::vector<std::weak_ptr<const Rows>> rows_;
};

/// How a rank gets what it has for itself, instead of sending it to itself.
struct OwnRows {
  UnreadRows::Read read;  // null: it sends
  std::shared_ptr<UnreadRows> unread;
};

/// Sends `sent[r]` of the flat values to rank r and returns `received[r]` of each rank r, in rank
/// order. The gradient travels back and is multiplied with `factor`. Collective, forward and
/// backward, also for a rank that has nothing. A group of one rank sends nothing. `meanwhile` is
/// done piece by piece while this rank would wait. With `own_rows`, which codecs do not go with,
/// the part of `values` for this rank is not read; the pieces are made while the others travel.
comm::Awaitable<at::Tensor> exchange_flat(const at::Tensor& values, Sizes sent, Sizes received,
                                          const comm::Group& group, const comm::Codecs& codecs,
                                          double factor, Exchange::Meanwhile meanwhile = nullptr,
                                          OwnRows own_rows = {});

/// The same with `own_rows` in a group that can lend (comm/lending.h): one part per rank, which
/// lies with the rank that made it and must not be written. `values`, and the gradients of the
/// parts of other ranks, belong into memory of comm::lendable; what lies elsewhere is copied.
comm::Awaitable<Exchange::Parts> lend_rows(const at::Tensor& values, Sizes sent, Sizes received,
                                           const comm::Group& group, double factor,
                                           Exchange::Meanwhile meanwhile, OwnRows own_rows);

}  // namespace tessera::sharding
