#include "dlrm/trial.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "core/cores.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/topology.h"
#include "trainer/train.h"

namespace tessera::workloads::dlrm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTries = 7;

double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

void time_dense(const Settings& settings, Dlrm& model, BatchSource& source,
                const comm::Group& group, planner::DenseLoad& load) {
  const DlrmOptions& options = model.options();
  const std::int64_t batch = settings.batch;
  const auto optimizer = trainer::make_optimizer("dlrm.trial", settings.optimizer,
                                                 model.parameters(), settings.learning_rate);
  const at::Tensor dense = at::full({batch, options.num_dense}, 0.5);
  const at::Tensor labels = at::zeros({batch});
  const auto num_tables = static_cast<std::int64_t>(options.features.size());
  const std::vector<std::int64_t> dims(options.features.size(), options.embedding_dim);
  const at::Tensor rows = at::full({batch, num_tables * options.embedding_dim}, 0.01);
  std::array<std::vector<double>, 4> times;
  for (int i = 0; i < kTries; ++i) {
    const at::Tensor values = rows.clone().requires_grad_();
    auto begin = Clock::now();
    source.next();
    times[3].push_back(since(begin));
    begin = Clock::now();
    optimizer->zero_grad();
    const at::Tensor logits =
        model.forward(dense, jagged::KeyedTensor(options.features, dims, values));
    const at::Tensor loss = at::binary_cross_entropy_with_logits(logits, labels);
    times[0].push_back(since(begin));
    begin = Clock::now();
    loss.backward();
    times[1].push_back(since(begin));
    begin = Clock::now();
    optimizer->step();
    times[2].push_back(since(begin));
  }
  at::Tensor medians = at::empty({4}, at::kDouble);
  for (std::size_t k = 0; k < times.size(); ++k) {
    std::nth_element(times[k].begin(), times[k].begin() + kTries / 2, times[k].end());
    medians[static_cast<std::int64_t>(k)] = times[k][kTries / 2];
  }
  comm::all_reduce_(medians, group);
  medians.div_(group.size());
  load.forward = medians[0].item<double>();
  load.backward = medians[1].item<double>();
  load.other = medians[2].item<double>();
  const int threads = comm::get_local_size(group.size()) * at::get_num_threads();
  if (threads >= core::cores_left()) load.other += medians[3].item<double>();
}

}  // namespace tessera::workloads::dlrm
