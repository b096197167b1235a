// trainer/metrics.h — what a training tells programs that watch it: every step, every evaluation.
// No LibTorch.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::trainer {

/// What is known of a step.
struct Metrics {
  enum class Kind : std::uint8_t { kStep, kEvaluation, kEnd };
  Kind kind = Kind::kStep;
  std::int64_t step = 0;  // from 1
  /// Of a step: "loss", "learning_rate", "seconds", "<unit>_per_second", "exposed_comm_seconds". Of
  /// an evaluation, and of the end: what the workload judges by.
  std::vector<std::pair<std::string, double>> figures;
};

/// Called on rank 0, by the thread that trains, between two steps: what takes long is for a thread
/// of its own. What it throws ends the training.
using MetricsCallback = std::function<void(const Metrics&)>;

}  // namespace tessera::trainer
