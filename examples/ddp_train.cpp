// Trains a small network on several ranks and loses nothing when it is told to stop: on SIGTERM all
// ranks finish the step they are in, rank 0 saves, and the next start goes on from there.
//
//   tessera run -n 2 -- build/release/bin/ddp_train [checkpoint] [steps]

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/data_parallel/distributed_data_parallel.h"

namespace comm = tessera::comm;

namespace {

std::atomic<bool> is_told_to_stop{false};

// y = sin(3 a) b, seen through other samples on every rank and in every step.
std::pair<at::Tensor, at::Tensor> batch_of(int step, int rank) {
  at::manual_seed(1000 * step + rank);
  const at::Tensor x = at::rand({64, 2}) * 2 - 1;
  return {x, at::sin(3 * x.select(1, 0)).mul(x.select(1, 1)).unsqueeze(1)};
}

int train(const comm::Group& world, const std::string& path, int num_steps) {
  at::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(2, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                            torch::nn::Tanh(), torch::nn::Linear(64, 1));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-3));
  int step = 0;
  if (std::filesystem::exists(path)) {  // every rank reads the same file
    torch::serialize::InputArchive archive;
    archive.load_from(path);
    net->load(archive);
    optimizer.load(archive);
    at::Tensor saved;
    archive.read("step", saved);
    step = saved.item<int>();
    if (world.rank() == 0) std::printf("resumed at step %d\n", step);
  }
  tessera::data_parallel::DistributedDataParallel model(net, world,
                                                        {.gradient_as_bucket_view = true});
  at::Tensor loss = at::zeros({});
  bool has_stopped = false;
  while (step < num_steps && !has_stopped) {
    comm::set_step(step);
    const auto [x, y] = batch_of(step, world.rank());
    optimizer.zero_grad();
    loss = at::mse_loss(model(x), y);
    loss.backward();  // gradients are averaged while it runs
    optimizer.step();
    ++step;
    // A signal may reach the ranks in different steps: stop where the first one wants to.
    at::Tensor stop = at::full({1}, is_told_to_stop ? 1 : 0, at::kInt);
    comm::all_reduce_(stop, world, comm::Reduction::kMax);
    has_stopped = stop.item<int>() != 0;
    if (world.rank() == 0 && step % 100 == 0) {
      std::printf("step %d of %d, loss %.5f\n", step, num_steps, loss.item<double>());
      std::fflush(stdout);
    }
  }
  if (world.rank() == 0) {
    torch::serialize::OutputArchive archive;
    net->save(archive);
    optimizer.save(archive);
    archive.write("step", at::full({}, step, at::kInt));
    archive.save_to(path + ".new");
    std::filesystem::rename(path + ".new", path);  // whole or absent
    std::printf("%s at step %d, loss %.5f, %d ranks over %s\n",
                has_stopped ? "stopped" : "finished", step, loss.item<double>(), world.size(),
                world.engine().c_str());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGTERM, [](int) { is_told_to_stop = true; });
  const comm::Group world = comm::init();
  const std::string path = argc > 1 ? argv[1] : "ddp_train.pt";
  return comm::guarded([&] { return train(world, path, argc > 2 ? std::atoi(argv[2]) : 600); });
}
