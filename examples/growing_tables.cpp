// Learns a number for every word of a stream nobody has counted: ids are any 64 bits, the table
// grows, and its rows lie over the ranks. The same numbers come out on any number of ranks.
//
//   tessera run -n 2 -- build/release/bin/growing_tables

#include <cstdint>
#include <cstdio>

#include <ATen/ATen.h>

#include "tessera/collision/growing_tables.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/group.h"
#include "tessera/sharding/comm_ops.h"

namespace collision = tessera::collision;
namespace comm = tessera::comm;
namespace jagged = tessera::jagged;

constexpr std::int64_t kSamples = 240;  // a step, of all ranks

// Samples [begin, end) of a step: one id each, drawn from more and more of them.
jagged::KeyedJaggedTensor samples(std::int64_t step, std::int64_t begin, std::int64_t end) {
  const at::Tensor numbers = (at::arange(begin, end) * 7919 + step * 104729) % (50 + 10 * step);
  jagged::KeyedJaggedFields fields;
  fields.lengths = at::ones({end - begin}, at::kInt);
  fields.stride = end - begin;
  return {{"word"}, numbers * 0x9e3779b97f4a7LL - 5, fields};
}

int main() {
  const comm::Group world = comm::init();
  return comm::guarded([&] {
    tessera::sharding::set_gradient_division(false);  // the loss below is a sum over all samples
    collision::GrowingTable word;
    word.config.name = "word";
    word.config.embedding_dim = 4;
    word.config.weight_init_min = word.config.weight_init_max = 0;
    word.ids.admission = {.kind = collision::AdmissionKind::kFrequency, .sightings = 2};
    collision::GrowingOptions options;
    options.optimizer.learning_rate = 0.05;
    collision::GrowingEmbeddingBagCollection table({word}, world, options);

    const std::int64_t begin = kSamples * world.rank() / world.size();
    const std::int64_t end = kSamples * (world.rank() + 1) / world.size();
    at::Tensor loss;
    for (std::int64_t step = 0; step < 40; ++step) {
      comm::set_step(step);
      const at::Tensor rows = table.forward(samples(step, begin, end))["word"];
      (rows - 1).pow(2).sum().backward();  // steps the rows where they lie
      loss = (rows.detach().to(at::kDouble) - 1).pow(2).sum();
    }
    loss = comm::all_reduce(loss, world);
    const auto growth = table.total_growth().front();
    if (world.rank() == 0) {
      std::printf("%d ranks: %lld ids, %lld of %lld sightings had a row, loss %.4f\n", world.size(),
                  static_cast<long long>(growth.ids), static_cast<long long>(growth.hits),
                  static_cast<long long>(growth.sightings), loss.item<double>());
    }
    return 0;
  });
}
