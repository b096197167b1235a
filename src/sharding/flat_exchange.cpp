#include "sharding/flat_exchange.h"

#include <numeric>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "comm/lending.h"
#include "core/kept_memory.h"
#include "tessera/comm/collectives.h"

namespace tessera::sharding {
namespace {

using comm::Codec;
using comm::Codecs;
using comm::Group;

class FlatAllToAll final : public Exchange {
 public:
  FlatAllToAll(Sizes sent, Sizes received, const Group& group, Codecs codecs, double factor)
      : sent_(std::move(sent)),
        received_(std::move(received)),
        group_(group),
        codecs_(codecs),
        factor_(factor) {}

  Pending start(const at::Tensor& input) override {
    return all_to_all_flat(input.contiguous(), sent_, received_, codecs_.forward, group_);
  }

  Pending start_backward(const at::Tensor& gradient) override {
    auto pending =
        all_to_all_flat(gradient.contiguous(), received_, sent_, codecs_.backward, group_);
    return {[pending, factor = factor_] {
              at::Tensor arrived = pending();
              return factor == 1.0 ? arrived : arrived.mul_(factor);
            },
            [pending] { return pending.is_ready(); }};
  }

 private:
  Sizes sent_;
  Sizes received_;
  Group group_;
  Codecs codecs_;
  double factor_;
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
    return core::empty_kept({std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0})},
                            values.options());
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
    const at::Tensor output = core::empty_kept(
        {std::accumulate(sent_.begin(), sent_.end(), std::int64_t{0})}, given[rank()].options());
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

Sizes wire_sizes(const Sizes& counts, const Codec& codec) {
  Sizes result = counts;
  for (auto& count : result) count = codec.wire_size(count);
  return result;
}

double gradient_factor(const Group& group) {
  return get_gradient_division() ? 1.0 / group.size() : 1.0;
}

Exchange::Pending all_to_all_flat(const at::Tensor& values, const Sizes& send, const Sizes& receive,
                                  const Codec& codec, const Group& group) {
  const auto dtype = values.scalar_type();
  const at::Tensor wire = codec.encode(values, send);
  auto work =
      comm::all_to_all_v_async(wire, wire_sizes(send, codec), group, wire_sizes(receive, codec));
  return {[=] { return codec.decode(work.wait(), receive, dtype); },
          [work] { return work.is_ready(); }};
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
  return run(
      std::make_shared<FlatAllToAll>(std::move(sent), std::move(received), group, codecs, factor),
      values, std::move(meanwhile));
}

}  // namespace tessera::sharding
