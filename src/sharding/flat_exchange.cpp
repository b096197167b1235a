#include "sharding/flat_exchange.h"

#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "comm/engines.h"
#include "comm/lending.h"
#include "core/kept_memory.h"
#include "sharding/sizes.h"
#include "tessera/comm/collectives.h"

namespace tessera::sharding {
namespace {

using comm::Codec;
using comm::Codecs;
using comm::Group;

// Elements that `counts` values become on the wire.
Sizes wire_sizes(const Sizes& counts, const Codec& codec) {
  Sizes result = counts;
  for (auto& count : result) count = codec.wire_size(count);
  return result;
}

comm::Awaitable<at::Tensor> move(Movement movement, const at::Tensor& wire, const Sizes& sent,
                                 const Sizes& received, const Group& group) {
  switch (movement) {
    case Movement::kReduceScatter:
      return comm::reduce_scatter_v_async(wire, sent, group);
    case Movement::kAllGather:
      return comm::all_gather_v_async(wire, group, received);
    default:
      return comm::all_to_all_v_async(wire, sent, group, received);
  }
}

Movement reverse_of(Movement movement) {
  if (movement == Movement::kReduceScatter) return Movement::kAllGather;
  return movement == Movement::kAllGather ? Movement::kReduceScatter : movement;
}

class FlatExchange final : public Exchange {
 public:
  explicit FlatExchange(FlatPlan plan) : plan_(std::move(plan)) {}

  Pending start(const at::Tensor& input) override {
    return send(plan_.movement, plan_.input.flat_of(input), plan_.sent, plan_.received,
                plan_.codecs.forward, plan_.output, 1.0);
  }

  Pending start_backward(const at::Tensor& gradient) override {
    return send(reverse_of(plan_.movement), plan_.output.flat_of(gradient), plan_.received,
                plan_.sent, plan_.codecs.backward, plan_.input, plan_.factor);
  }

 private:
  Pending send(Movement movement, const at::Tensor& values, const Sizes& sent,
               const Sizes& received, const Codec& codec, const Writing& writing,
               double factor) const {
    const auto dtype = values.scalar_type();
    const auto work = move(movement, codec.encode(values, sent), wire_sizes(sent, codec),
                           wire_sizes(received, codec), plan_.group);
    return {[=] {
              const at::Tensor arrived = codec.decode(work.wait(), received, dtype);
              return writing.read(factor == 1.0 ? arrived : arrived.mul_(factor));
            },
            [work] { return work.is_ready(); }};
  }

  FlatPlan plan_;
};

// An exchange without codecs, in which what a rank has for itself does not travel.
class BesideOwnRows : public Exchange {
 public:
  BesideOwnRows(Sizes sent, Sizes received, const Group& group, double factor, OwnRows own_rows)
      : sent_(std::move(sent)),
        received_(std::move(received)),
        group_(group),
        factor_(factor),
        own_rows_(std::move(own_rows)) {}

 protected:
  std::size_t rank() const { return static_cast<std::size_t>(group_.rank()); }

  Sizes sent_;
  Sizes received_;
  Group group_;
  double factor_;
  OwnRows own_rows_;
};

// Forward the own rows are made in place, backward they are copied, while the parts of the others
// are on their way.
class AllToAllOfOthers final : public BesideOwnRows {
 public:
  using BesideOwnRows::BesideOwnRows;

  Pending start(const at::Tensor& input) override {
    const at::Tensor output = like(input, received_);
    const auto pending = exchange(output, received_, input.contiguous(), sent_);
    const auto own =
        own_rows_.unread->add(part(output, received_, rank()), std::move(own_rows_.read));
    return {[pending, output] {
              pending.wait();
              return output;
            },
            [pending] { return pending.is_ready(); }, [own] { own->read_all(); }};
  }

  Pending start_backward(const at::Tensor& gradient) override {
    own_rows_.unread->read_all();  // the tables are stepped next
    const at::Tensor given = gradient.contiguous();
    const at::Tensor output = like(given, sent_);
    const auto pending = exchange(output, sent_, given, received_);
    const at::Tensor own = part(output, sent_, rank());
    const std::int64_t begin = own.storage_offset() - output.storage_offset();
    const std::int64_t end = begin + own.numel();
    return {[=, factor = factor_] {
              pending.wait();
              if (factor == 1.0) return output;
              output.narrow(0, 0, begin).mul_(factor);
              output.narrow(0, end, output.numel() - end).mul_(factor);
              return output;
            },
            [pending] { return pending.is_ready(); },
            [own, from = part(given, received_, rank()), factor = factor_] {
              at::Tensor to = own;
              at::mul_out(to, from, at::scalar_tensor(factor, from.options()));
            }};
  }

 private:
  static at::Tensor like(const at::Tensor& values, const Sizes& sizes) {
    return core::empty_kept({total(sizes)}, values.options());
  }

  static at::Tensor part(const at::Tensor& values, const Sizes& sizes, std::size_t number) {
    return values.narrow(0, std::accumulate(sizes.begin(), sizes.begin() + number, std::int64_t{0}),
                         sizes[number]);
  }

  comm::Awaitable<std::vector<at::Tensor>> exchange(const at::Tensor& output, const Sizes& received,
                                                    const at::Tensor& input,
                                                    const Sizes& sent) const {
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> inputs;
    for (std::size_t r = 0; r < sent.size(); ++r) {
      const bool travels = r != rank();
      outputs.push_back(travels ? part(output, received, r) : output.narrow(0, 0, 0));
      inputs.push_back(travels ? part(input, sent, r) : input.narrow(0, 0, 0));
    }
    return comm::all_to_all_pieces_async(std::move(outputs), inputs, group_);
  }
};

// The same between ranks that reach each other's memory: nothing is copied. A part of the result
// lies with the rank that looked it up, a part of the gradient with the rank whose samples it is
// of; it is multiplied into this rank's memory, which a gradient has to be anyway.
class LentToOthers final : public BesideOwnRows {
 public:
  using BesideOwnRows::BesideOwnRows;

  Pending start(const at::Tensor& input) override {
    const auto pending =
        comm::lend_async(input.contiguous().split_with_sizes(sent_), received_, group_);
    const at::Tensor mine = core::empty_kept({received_[rank()]}, input.options());
    const auto own = own_rows_.unread->add(mine, std::move(own_rows_.read));
    return {[pending, mine, rank = rank()] {
              Parts parts = pending.wait();
              parts[rank] = mine;
              return parts;
            },
            [pending] { return pending.is_ready(); }, [own] { own->read_all(); }};
  }

  Pending start_backward(const at::Tensor& gradient) override {
    return start_backward_of(gradient.split_with_sizes(received_));
  }

  Pending start_backward_of(const Parts& gradients) override {
    own_rows_.unread->read_all();  // the tables are stepped next
    Parts given;
    for (const at::Tensor& gradient : gradients) given.push_back(gradient.contiguous());
    const auto pending = comm::lend_async(given, sent_, group_);
    const at::Tensor output = core::empty_kept({total(sent_)}, given[rank()].options());
    const Parts parts = output.split_with_sizes(sent_);
    const at::Tensor factor = at::scalar_tensor(factor_, output.options());
    return {[=, rank = rank()] {
              const Parts arrived = pending.wait();
              for (std::size_t r = 0; r < arrived.size(); ++r) {
                at::Tensor to = parts[r];
                if (r != rank) at::mul_out(to, arrived[r], factor);
              }
              return output;
            },
            [pending] { return pending.is_ready(); },
            [factor, to = parts[rank()], from = given[rank()]]() mutable {
              at::mul_out(to, from, factor);
            }};
  }
};

}  // namespace

std::shared_ptr<const UnreadRows::Rows> UnreadRows::add(at::Tensor output, Read read) {
  std::erase_if(rows_, [](const auto& rows) { return rows.expired(); });
  auto rows = std::make_shared<const Rows>(Rows{std::move(output), std::move(read)});
  rows_.push_back(rows);
  return rows;
}

void UnreadRows::read_all() {
  for (const auto& rows : std::exchange(rows_, {})) {
    if (const auto unread = rows.lock()) unread->read_all();
  }
}

comm::Awaitable<at::Tensor> exchange_numbers(const at::Tensor& numbers, const Group& group) {
  if (group.size() == 1) return comm::NoWait<at::Tensor>(numbers);
  const at::Device device = comm::message_device(*group.process_group());
  const auto arrived = comm::all_to_all_async(numbers.to(device), group);
  return comm::Awaitable<at::Tensor>([arrived] { return arrived.wait().cpu().contiguous(); });
}

comm::Awaitable<at::Tensor> exchange_rows(const at::Tensor& rows, const Sizes& sent,
                                          const Group& group, const Sizes& received) {
  if (group.size() == 1) return comm::NoWait<at::Tensor>(rows);
  return comm::all_to_all_v_async(rows, sent, group, received);
}

Writing in_shape(Sizes shape) {
  return {[](const at::Tensor& values) { return values.contiguous().view({-1}); },
          [shape = std::move(shape)](const at::Tensor& flat) { return flat.view(shape); }};
}

std::shared_ptr<Exchange> make_exchange(FlatPlan plan) {
  return std::make_shared<FlatExchange>(std::move(plan));
}

double gradient_factor(const Group& group) {
  return get_gradient_division() ? 1.0 / group.size() : 1.0;
}

comm::Awaitable<Exchange::Parts> lend_rows(const at::Tensor& values, Sizes sent, Sizes received,
                                           const Group& group, double factor,
                                           Exchange::Meanwhile meanwhile, OwnRows own_rows) {
  // A rank without tables has none to read, and takes part.
  if (!own_rows.read) own_rows.read = [](const at::Tensor&) { return false; };
  return run_in_parts(std::make_shared<LentToOthers>(std::move(sent), std::move(received), group,
                                                     factor, std::move(own_rows)),
                      values, std::move(meanwhile));
}

comm::Awaitable<at::Tensor> exchange_flat(const at::Tensor& values, Sizes sent, Sizes received,
                                          const Group& group, const Codecs& codecs, double factor,
                                          Exchange::Meanwhile meanwhile, OwnRows own_rows) {
  if (group.size() == 1) return comm::NoWait<at::Tensor>(values);
  if (own_rows.read) {
    return run(std::make_shared<AllToAllOfOthers>(std::move(sent), std::move(received), group,
                                                  factor, std::move(own_rows)),
               values, std::move(meanwhile));
  }
  const Sizes is_flat{-1};
  return run(make_exchange({Movement::kAllToAll, std::move(sent), std::move(received),
                            in_shape(is_flat), in_shape(is_flat), group, codecs, factor}),
             values, std::move(meanwhile));
}

}  // namespace tessera::sharding
