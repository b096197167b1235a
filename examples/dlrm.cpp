// A recommender in C++: two kinds of tables over the ranks, dense layers on each.
//
//   tessera run -n 2 -- build/release/bin/dlrm [steps]

#include <cstdio>
#include <cstdlib>
#include <memory>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace comm = tessera::comm;
namespace embedding = tessera::embedding;
namespace jagged = tessera::jagged;
namespace sharding = tessera::sharding;

namespace {

constexpr std::int64_t kUsers = 2000;
constexpr std::int64_t kItems = 400;
constexpr std::int64_t kBatch = 512;

struct Batch {
  at::Tensor dense;
  jagged::KeyedJaggedTensor ids;
  at::Tensor clicked;
};

// A user clicks an item of their own taste (both are odd, or both even), and more so if `dense` is
// large. Other samples on every rank and in every step.
Batch batch_of(int step, int rank) {
  at::manual_seed(1000 * step + rank);
  const at::Tensor dense = at::randn({kBatch, 4});
  const at::Tensor users = at::randint(kUsers, {kBatch}, at::kLong);
  const at::Tensor items = at::randint(kItems, {kBatch}, at::kLong);
  const at::Tensor agrees = (users + items).remainder(2).eq(0).to(at::kFloat);
  const at::Tensor chance = at::sigmoid(3 * agrees - 2 + dense.select(1, 0));
  const at::Tensor lengths = at::ones({2 * kBatch}, at::kInt);  // bags of one id
  return {dense,
          jagged::KeyedJaggedTensor::from_lengths_sync({"user", "item"}, at::cat({users, items}),
                                                       lengths),
          at::bernoulli(chance)};
}

// Products of the embeddings and of the dense part, and layers on top.
struct Net : torch::nn::Module {
  Net()
      : bottom(register_module("bottom", torch::nn::Linear(4, 16))),
        top(register_module("top",
                            torch::nn::Sequential(torch::nn::Linear(48, 32), torch::nn::ReLU(),
                                                  torch::nn::Linear(32, 1)))) {}

  at::Tensor forward(const at::Tensor& dense, const at::Tensor& user, const at::Tensor& item) {
    const at::Tensor x = at::relu(bottom(dense));
    return top->forward(at::cat({x, user * item, x * user}, 1)).squeeze(1);
  }

  torch::nn::Linear bottom;
  torch::nn::Sequential top;
};

int train(const comm::Group& world, int num_steps) {
  const std::vector<embedding::EmbeddingBagConfig> configs{
      {.num_embeddings = kUsers, .embedding_dim = 16, .name = "users", .feature_names = {"user"}},
      {.num_embeddings = kItems, .embedding_dim = 16, .name = "items", .feature_names = {"item"}}};
  const auto plan = sharding::make_module_plan(
      configs, {{"users", sharding::row_wise()}, {"items", sharding::table_wise(world.size() - 1)}},
      {.world_size = world.size(), .local_size = world.size()});
  at::manual_seed(1 + world.rank());  // other rows on every rank; the layers become rank 0's
  sharding::ShardedOptions options;
  options.optimizer = {.kind = embedding::OptimizerKind::kRowWiseAdagrad, .learning_rate = 0.3};
  sharding::ShardedEmbeddingBagCollection tables(configs, plan, world, /*is_weighted=*/false,
                                                 options);
  auto net = std::make_shared<Net>();
  tessera::data_parallel::DistributedDataParallel<Net> model(net, world);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
  double loss_sum = 0;
  for (int step = 0; step < num_steps; ++step) {
    comm::set_step(step);
    const Batch batch = batch_of(step, world.rank());
    const jagged::KeyedTensor rows = tables.forward(batch.ids);  // talks to all ranks
    const at::Tensor logits = model(batch.dense, rows["user"], rows["item"]);
    at::Tensor loss = at::binary_cross_entropy_with_logits(logits, batch.clicked);
    optimizer.zero_grad();
    loss.backward();  // steps the tables' rows, averages the dense gradients
    optimizer.step();
    loss_sum += loss.item<double>();
    if ((step + 1) % 50 != 0) continue;
    at::Tensor mean = at::full({1}, loss_sum / 50, at::kDouble);
    comm::all_reduce_(mean, world, comm::Reduction::kAvg);
    loss_sum = 0;
    if (world.rank() == 0) {
      std::printf("step %d of %d, loss %.4f\n", step + 1, num_steps, mean.item<double>());
      std::fflush(stdout);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const comm::Group world = comm::init();
  return comm::guarded([&] { return train(world, argc > 1 ? std::atoi(argv[1]) : 300); });
}
