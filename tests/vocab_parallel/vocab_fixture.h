// tests/vocab_parallel/vocab_fixture.h — worlds, engines and devices the vocabulary cases run on.

#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "support/rank_processes.h"
#include "support/ranks.h"
#include "tessera/vocab_parallel/columns.h"

namespace tessera::testing {

struct VocabWorld {
  comm::Engine engine = comm::Engine::kShm;
  int size = 1;
  at::DeviceType device = at::kCPU;
  bool processes = false;  // ranks are processes, not threads
};

inline std::string vocab_world_name(const ::testing::TestParamInfo<VocabWorld>& info) {
  return std::string(info.param.device == at::kCUDA ? "cuda_" : "") +
         (info.param.engine == comm::Engine::kShm ? "shm" : "gloo") +
         std::to_string(info.param.size) + (info.param.processes ? "_processes" : "");
}

inline std::vector<VocabWorld> cpu_worlds() {
  std::vector<VocabWorld> worlds;
  for (const auto engine : {comm::Engine::kShm, comm::Engine::kGloo}) {
    for (int size = 1; size <= 4; ++size) worlds.push_back({engine, size, at::kCPU});
  }
  return worlds;
}

inline std::vector<VocabWorld> cuda_worlds() {
  return {{comm::Engine::kGloo, 1, at::kCUDA}, {comm::Engine::kGloo, 2, at::kCUDA}};
}

class Vocab : public ::testing::TestWithParam<VocabWorld> {
 protected:
  int size() const { return GetParam().size; }
  at::Device device() const {
    return GetParam().device == at::kCUDA ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
  }
  void on_all_ranks(const std::function<void(const comm::Group&)>& body) {
    if (GetParam().processes) {
      processes_.run(size(), body, test_options(GetParam().engine));
    } else {
      run_ranks(size(), body, test_options(GetParam().engine));
    }
  }
  std::vector<std::string> texts_of_all_ranks(
      const std::function<void(const comm::Group&)>& body) const {
    std::vector<std::string> texts;
    for (const auto& error : run_ranks_collecting(size(), body, test_options(GetParam().engine))) {
      texts.push_back(text_of(error));
    }
    return texts;
  }

 private:
  RankProcesses processes_;
};

/// This rank's columns of `whole`, apart from it, on `device`, requiring a gradient.
inline at::Tensor shard_of(const at::Tensor& whole, const vocab_parallel::Columns& columns,
                           at::Device device) {
  return whole.slice(-1, columns.start, columns.end).to(device).clone().requires_grad_(true);
}

}  // namespace tessera::testing
