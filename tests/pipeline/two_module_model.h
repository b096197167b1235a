// tests/pipeline/two_module_model.h — batches, and a model of two sharded modules and a layer.

#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "sharding/sharded_tables.h"
#include "tessera/comm/collectives.h"
#include "tessera/pipeline/train_pipeline.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::pipeline {

using jagged::KeyedJaggedTensor;
using sharding::ShardedEmbeddingBagCollection;
using tessera::testing::table;

struct Batch {
  at::Tensor dense;
  KeyedJaggedTensor features;
  std::int64_t number;
};

inline Batch make_batch(int rank, std::int64_t number) {
  auto generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * number + rank + 1));
  const std::int64_t size = 3 + (number + rank) % 3;  // differs between ranks
  const at::Tensor lengths = at::randint(0, 4, {3 * size}, generator, at::kInt);
  const at::Tensor ids = at::randint(0, 7, {lengths.sum().item<std::int64_t>()}, generator,
                                     at::TensorOptions(at::kLong));
  return {at::randn({size, 2}, generator),
          KeyedJaggedTensor({"f0", "f1", "f2"}, ids, {.lengths = lengths}), number};
}

inline Source<Batch> source_of(int rank, std::int64_t count, std::int64_t* num_read = nullptr) {
  auto next = std::make_shared<std::int64_t>(0);
  return [=]() -> std::optional<Batch> {
    if (*next == count) return std::nullopt;
    if (num_read != nullptr) ++*num_read;
    return make_batch(rank, (*next)++);
  };
}

inline KeyedJaggedTensor keys(const KeyedJaggedTensor& all,
                              const std::vector<std::int64_t>& which) {
  return all.permute(which);
}

/// Two sharded modules that share a group, and a layer whose gradients are averaged.
struct Model {
  std::shared_ptr<ShardedEmbeddingBagCollection> first;
  std::shared_ptr<ShardedEmbeddingBagCollection> second;
  torch::nn::Linear layer{nullptr};
  std::shared_ptr<torch::optim::SGD> optimizer;
  comm::Group group;
  std::vector<std::string> events;
  std::vector<at::Tensor> losses;

  explicit Model(const comm::Group& the_group) : group(the_group) {
    const int world = group.size();
    sharding::ShardedOptions options;
    options.optimizer.kind = embedding::OptimizerKind::kAdam;
    options.optimizer.learning_rate = 0.02;
    options.local_size = world;
    const std::vector<embedding::EmbeddingBagConfig> one = {table("a", 7, 4, {"f0"}),
                                                            table("b", 7, 4, {"f1"})};
    const std::vector<embedding::EmbeddingBagConfig> two = {table("c", 7, 4, {"f2"})};
    const sharding::Topology topology{world, world};
    first = std::make_shared<ShardedEmbeddingBagCollection>(
        one,
        sharding::make_module_plan(
            one, {{"a", sharding::table_wise(world - 1)}, {"b", sharding::row_wise()}}, topology),
        group, false, options);
    second = std::make_shared<ShardedEmbeddingBagCollection>(
        two, sharding::make_module_plan(two, {{"c", sharding::table_wise(0)}}, topology), group,
        false, options);
    std::map<std::string, at::Tensor> start;
    for (const char* name : {"a", "b", "c"}) {
      start[name] = at::arange(28, at::kFloat).view({7, 4}).sin() * (name[0] - 'a' + 1);
    }
    first->load_tables({{"a", start["a"]}, {"b", start["b"]}});
    second->load_tables({{"c", start["c"]}});
    layer = torch::nn::Linear(14, 1);
    const at::NoGradGuard no_grad;
    layer->weight.copy_(at::arange(14, at::kFloat).cos().view({1, 14}));
    layer->bias.zero_();
    optimizer = std::make_shared<torch::optim::SGD>(layer->parameters(), 0.002);
  }

  at::Tensor logits(const at::Tensor& dense, const jagged::KeyedTensor& rows,
                    const jagged::KeyedTensor& more) {
    return layer->forward(at::cat({dense, rows["f0"], rows["f1"], more["f2"]}, 1)).squeeze(1);
  }

  void step() {
    for (auto& parameter : layer->parameters()) {
      parameter.mutable_grad().copy_(comm::all_reduce(parameter.grad(), group) / group.size());
    }
    optimizer->step();
  }

  Steps<Batch> steps() {
    Steps<Batch> steps;
    steps.zero_grad = [this] { optimizer->zero_grad(); };
    steps.forward = [this](const Batch& batch, const SparseInputs& inputs) {
      events.push_back("forward " + std::to_string(batch.number));
      const auto rows = first->compute_and_output_dist(inputs.of(*first)).wait();
      const auto more = second->compute_and_output_dist(inputs.of(*second)).wait();
      const at::Tensor output = logits(batch.dense, rows, more);
      return Result{(output - 1).pow(2), output};
    };
    steps.step = [this] { step(); };
    return steps;
  }

  std::vector<PipelinedModule<Batch>> modules() {
    return {{"first", first,
             [this](const Batch& batch) {
               events.push_back("start " + std::to_string(batch.number));
               return keys(batch.features, {0, 1});
             }},
            {"second", second, [](const Batch& batch) { return keys(batch.features, {2}); }}};
  }

  // The plain loop, on forward of the modules.
  std::vector<at::Tensor> train_plainly(std::int64_t count) {
    std::vector<at::Tensor> outputs;
    for (std::int64_t i = 0; i < count; ++i) {
      const Batch batch = make_batch(group.rank(), i);
      optimizer->zero_grad();
      const auto rows = first->forward(keys(batch.features, {0, 1}));
      const auto more = second->forward(keys(batch.features, {2}));
      const at::Tensor output = logits(batch.dense, rows, more);
      (output - 1).pow(2).sum().backward();
      step();
      outputs.push_back(output.detach());
    }
    return outputs;
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& module : {first, second}) {
      for (const auto& [name, weight] : module->gather_tables()) all.push_back(weight);
    }
    for (const auto& parameter : layer->parameters()) all.push_back(parameter.detach());
    return all;
  }
};

template <class Pipe>
std::vector<at::Tensor> run_all(Pipe& pipe, const Source<Batch>& source) {
  std::vector<at::Tensor> outputs;
  while (auto output = pipe.progress(source)) outputs.push_back(output->detach());
  return outputs;
}

}  // namespace tessera::pipeline
