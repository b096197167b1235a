#include "gnn/training.h"

#include <chrono>
#include <memory>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "gnn/partitioner.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/core/check.h"

namespace tessera::workloads::gnn {
namespace {

using Clock = std::chrono::steady_clock;

// Judging structures come from seeds that training never uses.
constexpr std::uint64_t kJudgeSeed = 1'000'000;

struct Sample {
  Structure structure;
  LocalGraph graph;
};

void check(const TrainingOptions& options) {
  TESSERA_CHECK_VALUE(options.num_steps >= 0 && options.batch > 0 && options.num_structures > 0,
                      "gnn.train: ", options.num_steps, " steps of ", options.batch,
                      " structures out of ", options.num_structures, " make no sense.");
  TESSERA_CHECK_VALUE(options.optimizer == "adam" || options.optimizer == "sgd",
                      "gnn.train: there is no optimizer '", options.optimizer,
                      "'. There are adam and sgd.");
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const TrainingOptions& options,
                                                        at::Tensor& parameters) {
  const std::vector<at::Tensor> list{parameters};
  if (options.optimizer == "sgd") {
    return std::make_unique<torch::optim::SGD>(list,
                                               torch::optim::SGDOptions(options.learning_rate));
  }
  return std::make_unique<torch::optim::Adam>(list,
                                              torch::optim::AdamOptions(options.learning_rate));
}

class Training {
 public:
  Training(const TrainingOptions& options, const comm::Mesh& mesh)
      : options_(options),
        data_(mesh.group("data")),
        graph_(mesh.group("graph")),
        model_(options.model, options.seed),
        optimizer_(make_optimizer(options, model_.parameters())) {
    options_.structure.cutoff = options.model.cutoff;
    for (std::int64_t i = 0; i < options.num_structures; ++i) {
      // Round robin over the data-parallel ranks: a structure lives where it is trained on.
      if (i % data_.size() == data_.rank()) training_.push_back(make_sample(options.seed + i));
    }
    TESSERA_CHECK_VALUE(options.num_structures >= data_.size(),
                        "gnn.train: ", options.num_structures, " structures are not enough for ",
                        data_.size(), " data-parallel ranks.");
    const std::int64_t num_judged = std::max<std::int64_t>(1, options.num_structures / 4);
    for (std::int64_t i = 0; i < num_judged; ++i) {
      if (i % data_.size() == data_.rank()) judged_.push_back(make_sample(kJudgeSeed + i));
    }
  }

  // Loss and gradient over the batch of this step, averaged over the data-parallel ranks.
  double step(std::int64_t number) {
    at::Tensor& parameters = model_.parameters();
    at::Tensor gradient = at::zeros_like(parameters);
    double loss_sum = 0;
    for (std::int64_t i = 0; i < options_.batch; ++i) {
      const auto index = static_cast<std::size_t>(number * options_.batch + i) % training_.size();
      const at::Tensor loss = loss_of(training_[index]);
      gradient += torch::autograd::grad({loss}, {parameters})[0];
      loss_sum += loss.item<double>();
    }
    gradient /= static_cast<double>(options_.batch);
    comm::all_reduce_(gradient, data_, comm::Reduction::kAvg);
    parameters.mutable_grad() = gradient;
    optimizer_->step();
    at::Tensor loss = at::full({1}, loss_sum / static_cast<double>(options_.batch), at::kDouble);
    comm::all_reduce_(loss, data_, comm::Reduction::kAvg);
    return loss.item<double>();
  }

  Errors judge() const {
    at::Tensor sums = at::zeros({3}, at::kDouble);
    for (const Sample& sample : judged_) {
      const Prediction prediction = model_.predict(sample.graph, sample.structure.positions,
                                                   sample.structure.box.cell, false, false);
      const auto num_atoms = static_cast<double>(sample.structure.num_atoms());
      sums[0] += (prediction.energy - sample.structure.energy).abs() / num_atoms;
      sums[1] += (prediction.forces - sample.structure.forces).abs().mean();
      sums[2] += 1;
    }
    comm::all_reduce_(sums, data_);
    const double count = sums[2].item<double>();
    return {sums[0].item<double>() / count, sums[1].item<double>() / count};
  }

  double mean_halo() const {
    at::Tensor sums = at::zeros({2}, at::kDouble);
    for (const Sample& sample : training_) {
      sums[0] += static_cast<double>(sample.graph.plan.num_halo());
      sums[1] += 1;
    }
    comm::all_reduce_(sums, graph_);
    comm::all_reduce_(sums, data_);
    return sums[0].item<double>() / sums[1].item<double>();
  }

  std::int64_t atoms_per_step() const {
    return options_.structure.num_atoms * options_.batch * data_.size();
  }
  at::Tensor parameters() { return model_.parameters().detach(); }

 private:
  Sample make_sample(std::uint64_t seed) const {
    Structure structure = make_structure(options_.structure, seed);
    const auto partition = make_partition(options_.partition, structure.positions, structure.box,
                                          structure.neighbours.edge_index, graph_.size());
    LocalGraph graph = make_local_graph(structure, partition, graph_);
    return {std::move(structure), std::move(graph)};
  }

  at::Tensor loss_of(const Sample& sample) const {
    const Prediction prediction = model_.predict(sample.graph, sample.structure.positions,
                                                 sample.structure.box.cell, false, true);
    const auto num_atoms = static_cast<double>(sample.structure.num_atoms());
    const at::Tensor energy = ((prediction.energy - sample.structure.energy) / num_atoms).pow(2);
    const at::Tensor forces = (prediction.forces - sample.structure.forces).pow(2).mean();
    return energy + options_.force_weight * forces;
  }

  TrainingOptions options_;
  comm::Group data_;
  comm::Group graph_;
  Model model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Sample> training_;
  std::vector<Sample> judged_;
};

}  // namespace

Summary train(const TrainingOptions& options, const comm::Mesh& mesh,
              const std::function<void(const Progress&)>& report) {
  check(options);
  Training training(options, mesh);
  Summary summary;
  summary.before = training.judge();
  summary.halo_rows = training.mean_halo();
  for (std::int64_t step = 0; step < options.num_steps; ++step) {
    comm::set_step(step + 1);
    const auto begin = Clock::now();
    const double loss = training.step(step);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (report) {
      report({step + 1, loss, seconds, static_cast<double>(training.atoms_per_step()) / seconds});
    }
  }
  summary.after = training.judge();
  summary.parameters = training.parameters();
  summary.num_parameters = summary.parameters.numel();
  return summary;
}

}  // namespace tessera::workloads::gnn
