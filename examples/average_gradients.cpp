// Fits a line on several ranks: each sees its own samples, gradients are averaged by all-reduce.
//
//   tessera run -n 2 -- build/release/bin/average_gradients

#include <cstdio>

#include <ATen/ATen.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/group.h"

namespace comm = tessera::comm;

int main() {
  const comm::Group world = comm::init();
  return comm::guarded([&] {
    // y = 2 x + 1, seen through other samples on every rank.
    at::manual_seed(world.rank());
    const at::Tensor x = at::rand({256, 1}, at::kDouble);
    const at::Tensor inputs = at::cat({x, at::ones_like(x)}, 1);
    const at::Tensor targets = 2 * x + 1;

    at::Tensor weights = at::zeros({2, 1}, at::kDouble);
    for (int step = 0; step < 500; ++step) {
      comm::set_step(step);
      at::Tensor gradient = at::matmul(inputs.t(), at::matmul(inputs, weights) - targets) / 256;
      comm::all_reduce_(gradient, world, comm::Reduction::kAvg);
      weights -= gradient;
    }
    if (world.rank() == 0) {
      std::printf("%d ranks over %s: y = %.3f x + %.3f\n", world.size(), world.engine().c_str(),
                  weights[0].item<double>(), weights[1].item<double>());
    }
    return 0;
  });
}
