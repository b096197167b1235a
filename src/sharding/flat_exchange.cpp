#include "sharding/flat_exchange.h"

#include <utility>

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

}  // namespace

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

comm::Awaitable<at::Tensor> exchange_flat(const at::Tensor& values, Sizes sent, Sizes received,
                                          const Group& group, const Codecs& codecs, double factor,
                                          Exchange::Meanwhile meanwhile) {
  if (group.size() == 1) return comm::NoWait<at::Tensor>(values);
  return run(
      std::make_shared<FlatAllToAll>(std::move(sent), std::move(received), group, codecs, factor),
      values, std::move(meanwhile));
}

}  // namespace tessera::sharding
