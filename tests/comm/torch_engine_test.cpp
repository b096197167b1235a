#include "comm/torch_engine.h"

#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include <optional>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/gloo/gloo_backend.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// Gloo stands for NCCL: both have threads, and wait for them at their end.
TEST(TorchEngine, AForkedChildLeavesItAlone) {
  auto gloo = make_gloo_backend(c10::make_intrusive<c10d::HashStore>(), 0, 1, 20s, "127.0.0.1");
  std::optional<TorchEngine> engine(gloo);
  std::vector<at::Tensor> tensors{at::ones({3})};
  gloo->allreduce(tensors)->wait();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // it would wait for ever
    engine.reset();
    gloo.reset();
    _exit(7);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  // The rank's own goes on, and ends.
  gloo->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(tensors[0], at::ones({3})));
  gloo.reset();
  engine.reset();
}

}  // namespace
}  // namespace tessera::comm
