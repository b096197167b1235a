// A workload of one's own: the model, the batches and the metrics are here; the loop, checkpoints,
// resume, signals, progress and the report are the trainer's.

#include "line.h"

#include <iostream>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <tessera/checkpoint/modules.h>
#include <tessera/data_parallel/distributed_data_parallel.h>
#include <tessera/trainer/run.h>

namespace trainer = tessera::trainer;

namespace {

struct Points {
  at::Tensor x;
  at::Tensor y;
  Points to(at::Device device, bool non_blocking) const {
    return {x.to(device, non_blocking), y.to(device, non_blocking)};
  }
};

class Line final : public trainer::Workload<Points> {
 public:
  Line(const LineSettings& settings, const tessera::comm::Group& world)
      : settings_(settings),
        world_(world),
        model_(torch::nn::Linear(1, 1), world),
        optimizer_(model_.parameters(), torch::optim::AdamOptions(settings.learning_rate)) {}

  std::string name() const override { return "line"; }
  std::string command() const override { return "./line"; }
  const trainer::Settings& settings() const override { return settings_; }

  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  void add_state(tessera::checkpoint::State& state) override {
    tessera::checkpoint::add_module(state, model_.module());
    tessera::checkpoint::add_optimizer(state, optimizer_, *model_.module());
  }
  std::vector<at::Tensor> parameters() const override { return model_.parameters(); }

  // A checkpoint loads into a job with the same, and no other.
  std::vector<trainer::Mark> marks() const override {
    return {{"points_per_step", settings_.batch * world_.size(), "", " points per step"}};
  }

  // A function of the step and the rank alone, so that a run can go on anywhere.
  Points read(std::int64_t step) override {
    auto draw = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(
        (settings_.seed * 1000003 + step) * world_.size() + world_.rank()));
    const at::Tensor x = at::rand({settings_.batch, 1}, draw, at::kFloat);
    const at::Tensor noise = settings_.noise * at::randn({settings_.batch, 1}, draw, at::kFloat);
    return {x, 2 * x - 1 + noise};
  }
  Result forward(const Points& points, const Inputs& /*inputs*/) override {
    return {at::mse_loss(model_(points.x), points.y), {}};
  }

  trainer::Figures evaluate() override {
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::linspace(0, 1, 100).unsqueeze(1);
    const at::Tensor off = model_.module()->forward(x) - (2 * x - 1);
    return {{"error", off.abs().max().item<double>()}};
  }
  double units_per_step() const override {
    return static_cast<double>(settings_.batch * world_.size());
  }
  trainer::Figures results() const override {
    return {{"slope", model_.module()->weight.item<double>()},
            {"offset", model_.module()->bias.item<double>()}};
  }

 private:
  const LineSettings& settings_;
  tessera::comm::Group world_;
  tessera::data_parallel::DistributedDataParallel<torch::nn::LinearImpl> model_;
  torch::optim::Adam optimizer_;
};

}  // namespace

int main(int argc, char** argv) {
  LineSettings settings;
  LineSettings saved;
  const auto make = [&](const tessera::comm::Group& world) {
    torch::manual_seed(static_cast<std::uint64_t>(settings.seed));
    return std::make_unique<Line>(settings, world);
  };
  // Of every step and evaluation, on rank 0.
  const auto tell = [&](const trainer::Metrics& metrics) {
    if (!settings.tells) return;
    for (const auto& [name, value] : metrics.figures) {
      std::cerr << metrics.step << " " << name << " " << value << "\n";
    }
  };
  return trainer::run_program(settings, saved, {argv + 1, argv + argc}, make, tell);
}
