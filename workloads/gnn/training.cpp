#include "gnn/training.h"

#include <cstdio>

#include <ATen/ATen.h>

#include "gnn/model.h"
#include "gnn/partitioner.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "trainer/device.h"
#include "trainer/train.h"

namespace tessera::workloads::gnn {
namespace {

// Judging structures come from seeds that training never uses.
constexpr std::uint64_t kJudgeSeed = 1'000'000;

struct Sample {
  Structure structure;
  LocalGraph graph;
};

// The samples of one step, which lie on this rank already.
using Batch = std::vector<const Sample*>;

void check(const Settings& settings) {
  TESSERA_CHECK_VALUE(settings.num_steps >= 0 && settings.batch > 0 && settings.num_structures > 0,
                      "gnn.train: ", settings.num_steps, " steps of ", settings.batch,
                      " structures out of ", settings.num_structures, " make no sense.");
  TESSERA_CHECK_VALUE(settings.optimizer == "adam" || settings.optimizer == "sgd",
                      "gnn.train: there is no optimizer '", settings.optimizer,
                      "'. There are adam and sgd.");
}

comm::Mesh make_mesh(const Settings& settings, const comm::Group& world) {
  check(settings);
  const int size = settings.graph_parallel == 0 ? world.size() : settings.graph_parallel;
  return {world, {{"data", world.size() / size}, {"graph", size}}};
}

ModelOptions model_options(const Settings& settings) {
  ModelOptions model;
  model.num_features = settings.num_features;
  model.num_layers = settings.num_layers;
  model.cutoff = settings.cutoff;
  model.overlap = !settings.no_overlap;
  model.dtype = settings.precision == "float64" ? at::kDouble : at::kFloat;
  model.device = trainer::device_of(settings);
  return model;
}

// The network and its loss as a module, whose gradients are averaged over the data ranks.
class Net : public torch::nn::Module {
 public:
  explicit Net(const Settings& settings)
      : model_(model_options(settings), static_cast<std::uint64_t>(settings.seed)),
        force_weight_(settings.force_weight) {
    register_parameter("parameters", model_.parameters());
  }

  at::Tensor forward(const Batch& batch) {
    at::Tensor loss = loss_of(*batch[0]);
    for (std::size_t i = 1; i < batch.size(); ++i) loss = loss + loss_of(*batch[i]);
    return loss / static_cast<double>(batch.size());
  }

  const Model& model() const noexcept { return model_; }

 private:
  at::Tensor loss_of(const Sample& sample) const {
    const Prediction prediction = model_.predict(sample.graph, sample.structure.positions,
                                                 sample.structure.box.cell, false, true);
    const auto num_atoms = static_cast<double>(sample.structure.num_atoms());
    const at::Tensor energy = ((prediction.energy - sample.structure.energy) / num_atoms).pow(2);
    const at::Tensor forces = (prediction.forces - sample.structure.forces).pow(2).mean();
    return energy + force_weight_ * forces;
  }

  Model model_;
  double force_weight_;
};

class Training final : public trainer::Workload<Batch> {
 public:
  Training(const Settings& settings, const comm::Group& world)
      : settings_(settings),
        mesh_(make_mesh(settings, world)),
        data_(mesh_.group("data")),
        graph_(mesh_.group("graph")),
        model_(std::make_shared<Net>(settings), data_, {.gradient_as_bucket_view = true}),
        optimizer_(trainer::make_optimizer("gnn.train", settings.optimizer, model_.parameters(),
                                           settings.learning_rate)) {
    // Round robin over the data-parallel ranks: a structure lives where it is trained on.
    for (std::int64_t i = data_.rank(); i < settings.num_structures; i += data_.size()) {
      training_.push_back(make_sample(static_cast<std::uint64_t>(settings.seed + i)));
    }
    TESSERA_CHECK_VALUE(settings.num_structures >= data_.size(),
                        "gnn.train: ", settings.num_structures, " structures are not enough for ",
                        data_.size(), " data-parallel ranks.");
    const std::int64_t num_judged = std::max<std::int64_t>(1, settings.num_structures / 4);
    for (std::int64_t i = data_.rank(); i < num_judged; i += data_.size()) {
      judged_.push_back(make_sample(kJudgeSeed + static_cast<std::uint64_t>(i)));
    }
  }

  std::string name() const override { return "gnn"; }
  const trainer::Settings& settings() const override { return settings_; }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  void add_state(checkpoint::State& state) override {
    checkpoint::add_module(state, model_.module());
    checkpoint::add_optimizer(state, *optimizer_, *model_.module());
  }
  std::vector<at::Tensor> parameters() const override { return model_.parameters(); }
  std::vector<trainer::Mark> marks() const override {
    return {{"structures_per_step", settings_.batch * data_.size(), "",
             " structures per step over all ranks"},
            {"seed", settings_.seed, "seed "}};
  }

  Batch read(std::int64_t step) override {
    Batch batch;
    for (std::int64_t i = 0; i < settings_.batch; ++i) {
      const auto index = static_cast<std::size_t>(step * settings_.batch + i);
      batch.push_back(&training_[index % training_.size()]);
    }
    return batch;
  }
  Result forward(const Batch& batch, const Inputs& /*inputs*/) override {
    const core::Span span(core::Phase::kDense);
    return {model_(batch), {}};
  }

  void begin() override {
    before_ = evaluate();
    at::Tensor sums = at::zeros({2}, at::kDouble);
    for (const Sample& sample : training_) {
      sums[0] += static_cast<double>(sample.graph.plan.num_halo());
      sums[1] += 1;
    }
    comm::all_reduce_(sums, graph_);
    comm::all_reduce_(sums, data_);
    halo_rows_ = sums[0].item<double>() / sums[1].item<double>();
  }
  trainer::Figures evaluate() override {
    at::Tensor sums = at::zeros({3}, at::kDouble);
    for (const Sample& sample : judged_) {
      const Prediction prediction = model_.module()->model().predict(
          sample.graph, sample.structure.positions, sample.structure.box.cell, false, false);
      const auto num_atoms = static_cast<double>(sample.structure.num_atoms());
      sums[0] += ((prediction.energy - sample.structure.energy).abs() / num_atoms).detach().cpu();
      sums[1] += (prediction.forces - sample.structure.forces).abs().mean().detach().cpu();
      sums[2] += 1;
    }
    comm::all_reduce_(sums, data_);
    const double count = sums[2].item<double>();
    return {{"energy_error", sums[0].item<double>() / count},
            {"force_error", sums[1].item<double>() / count}};
  }

  std::string unit() const override { return "atoms"; }
  double units_per_step() const override {
    return static_cast<double>(settings_.num_atoms * settings_.batch * data_.size());
  }
  std::string introduction() override {
    char text[160];
    std::snprintf(text, sizeof(text), "structures %ld of %ld atoms | data %d x graph %d | %s\n",
                  static_cast<long>(settings_.num_structures),
                  static_cast<long>(settings_.num_atoms), data_.size(), graph_.size(),
                  settings_.partition.c_str());
    return text;
  }
  std::string verdict(const trainer::Figures& after) const override {
    char text[160];
    std::snprintf(text, sizeof(text),
                  "energy error %.4f per atom, was %.4f | force error %.4f, was %.4f\n",
                  after[0].second, before_[0].second, after[1].second, before_[1].second);
    return text;
  }
  trainer::Figures results() const override {
    return {{"parameters", static_cast<double>(model_.parameters()[0].numel())},
            {"halo_rows", halo_rows_},
            {"energy_error_before", before_[0].second},
            {"force_error_before", before_[1].second}};
  }

 private:
  Sample make_sample(std::uint64_t seed) const {
    StructureOptions options;
    options.num_atoms = settings_.num_atoms;
    options.cutoff = settings_.cutoff;
    Structure structure = make_structure(options, seed);
    const auto partition = make_partition(settings_.partition, structure.positions, structure.box,
                                          structure.neighbours.edge_index, graph_.size());
    LocalGraph graph = make_local_graph(structure, partition, graph_);
    const at::Device device = trainer::device_of(settings_);
    for (at::Tensor* tensor :
         {&structure.positions, &structure.box.cell, &structure.energy, &structure.forces,
          &graph.nodes, &graph.types, &graph.edges, &graph.shifts}) {
      *tensor = tensor->to(device);
    }
    return {std::move(structure), std::move(graph)};
  }

  const Settings& settings_;
  comm::Mesh mesh_;
  comm::Group data_;
  comm::Group graph_;
  data_parallel::DistributedDataParallel<Net> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Sample> training_;
  std::vector<Sample> judged_;
  trainer::Figures before_;
  double halo_rows_ = 0;
};

}  // namespace

std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world) {
  return std::make_unique<Training>(settings, world);
}

}  // namespace tessera::workloads::gnn
