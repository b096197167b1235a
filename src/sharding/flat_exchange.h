// src/sharding/flat_exchange.h — flat values to all ranks, with the gradient coming back.

#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "sharding/exchange.h"
#include "tessera/comm/codec.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {

/// What gradients of an exchange over `group` are multiplied with, at this moment.
double gradient_factor(const comm::Group& group);

/// Row r of [ranks, numbers] of int64 goes to rank r; row r of the result, on the CPU, is what rank
/// r has for this rank. One small message, over the engine that is quickest with it. Collective.
comm::Awaitable<at::Tensor> exchange_numbers(const at::Tensor& numbers, const comm::Group& group);

/// `sent[r]` rows go to rank r, `received[r]` come from it; a group of one rank sends nothing. No
/// gradient. Collective.
comm::Awaitable<at::Tensor> exchange_rows(const at::Tensor& rows, const Sizes& sent,
                                          const comm::Group& group, const Sizes& received);

/// What happens to the flat values of all ranks. The gradient of an all-to-all is one; a
/// reduce-scatter and an all-gather are each other's.
enum class Movement : std::uint8_t {
  kAllToAll,       // `sent[r]` values go to rank r, `received[r]` come from it
  kReduceScatter,  // rank r keeps its part, `sent[r]` values, of the sum over the ranks
  kAllGather,      // everybody gets the parts of all, `received[r]` values of rank r
};

/// How a tensor is written as flat values, and read from them. Neither writes what it is given.
struct Writing {
  std::function<at::Tensor(const at::Tensor&)> flat_of;
  std::function<at::Tensor(const at::Tensor&)> read;
};
/// As it lies in memory.
Writing in_shape(Sizes shape);

/// An exchange as data: what goes out, how it moves, what comes in.
struct FlatPlan {
  Movement movement = Movement::kAllToAll;
  Sizes sent;
  Sizes received;
  Writing input;
  Writing output;
  comm::Group group;
  comm::Codecs codecs;
  double factor = 1.0;  // of the gradients
};
std::shared_ptr<Exchange> make_exchange(FlatPlan plan);

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
