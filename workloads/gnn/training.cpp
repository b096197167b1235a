#include "gnn/training.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>
#include <random>
#include <sstream>

#include <ATen/ATen.h>

#include "gnn/model.h"
#include "gnn/own_structures.h"
#include "gnn/partitioner.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "trainer/data_error.h"
#include "trainer/device.h"
#include "trainer/train.h"

namespace tessera::workloads::gnn {
namespace {

// Judging structures come from seeds that training never uses.
constexpr std::uint64_t kJudgeSeed = 1'000'000;

struct Sample {
  Structure structure;
  LocalGraph graph;
  at::Tensor counts;  // of atoms, by species; undefined if structures are made here
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

ModelOptions model_options(const Settings& settings, std::int64_t num_types) {
  ModelOptions model;
  model.num_types = num_types;
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
  /// `atomic_energies` are not learned; undefined: atoms have none.
  Net(const Settings& settings, std::int64_t num_types, at::Tensor atomic_energies)
      : atomic_energies_(std::move(atomic_energies)),
        model_(model_options(settings, num_types), static_cast<std::uint64_t>(settings.seed)),
        force_weight_(settings.force_weight),
        stress_weight_(settings.stress_weight) {
    register_parameter("parameters", model_.parameters());
  }

  at::Tensor forward(const Batch& batch) {
    at::Tensor loss = loss_of(*batch[0]);
    for (std::size_t i = 1; i < batch.size(); ++i) loss = loss + loss_of(*batch[i]);
    return loss / static_cast<double>(batch.size());
  }

  const Model& model() const noexcept { return model_; }

  /// Of its atoms if each were alone.
  double lone_energy(const Sample& sample) const {
    return sample.counts.defined() ? at::dot(sample.counts, atomic_energies_).item<double>() : 0;
  }

 private:
  at::Tensor loss_of(const Sample& sample) const {
    const Structure& known = sample.structure;
    const bool has_stress = stress_weight_ > 0 && known.stress.defined();
    const Prediction prediction =
        model_.predict(sample.graph, known.positions, known.box.cell, has_stress, true);
    const auto num_atoms = static_cast<double>(known.num_atoms());
    at::Tensor loss = at::zeros({}, prediction.energy.options().requires_grad(false));
    if (known.energy.defined()) {
      const at::Tensor bound = known.energy - lone_energy(sample);
      loss = loss + ((prediction.energy - bound) / num_atoms).pow(2);
    }
    if (known.forces.defined()) {
      loss = loss + force_weight_ * (prediction.forces - known.forces).pow(2).mean();
    }
    if (has_stress) loss = loss + stress_weight_ * (prediction.stress - known.stress).pow(2).mean();
    return loss;
  }

  at::Tensor atomic_energies_;
  Model model_;
  double force_weight_;
  double stress_weight_;
};

// In the values of a checkpoint: the elements in the order of their types, with spaces between.
constexpr const char* kSpecies = "species";

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

// None if the structures were made here.
std::vector<std::string> species_of(const std::string& checkpoints, std::int64_t step) {
  const auto reader = step >= 0 ? std::make_unique<checkpoint::Reader>(checkpoints, step)
                                : checkpoint::find_newest(checkpoints).reader;
  if (reader == nullptr) {
    throw checkpoint::Error(checkpoint::ErrorKind::kMissing,
                            checkpoints + ": there is no checkpoint.");
  }
  const checkpoint::Values& values = reader->manifest().values;
  const auto found = values.find(kSpecies);
  std::vector<std::string> all;
  if (found == values.end()) return all;
  std::istringstream words(std::get<std::string>(found->second));
  for (std::string word; words >> word;) all.push_back(word);
  return all;
}

class Training final : public trainer::Workload<Batch> {
 public:
  /// Without structures to train on it can only judge.
  Training(const Settings& settings, std::optional<OwnStructures> own, const comm::Group& world)
      : settings_(settings),
        mesh_(make_mesh(settings, world)),
        data_(mesh_.group("data")),
        graph_(mesh_.group("graph")),
        own_(std::move(own)),
        model_(std::make_shared<Net>(settings, num_types(),
                                     own_ ? own_->atomic_energies : at::Tensor()),
               data_, {.gradient_as_bucket_view = true}),
        optimizer_(trainer::make_optimizer("gnn.train", settings.optimizer, model_.parameters(),
                                           settings.learning_rate)) {
    // Round robin over the data-parallel ranks: a structure lives where it is trained on.
    const bool only_judges = own_ && own_->training.empty();
    TESSERA_CHECK_VALUE(only_judges || num_structures() >= data_.size(),
                        "gnn.train: ", num_structures(), " structures are not enough for ",
                        data_.size(), " data-parallel ranks.");
    for (std::int64_t i = data_.rank(); i < num_structures(); i += data_.size()) {
      training_.push_back(own_ ? own_sample(own_->training[static_cast<std::size_t>(i)])
                               : made_sample(static_cast<std::uint64_t>(settings.seed + i)));
    }
    const std::int64_t num_judged =
        own_ ? std::ssize(own_->judged) : std::max<std::int64_t>(1, settings.num_structures / 4);
    for (std::int64_t i = data_.rank(); i < num_judged; i += data_.size()) {
      judged_.push_back(own_ ? own_sample(own_->judged[static_cast<std::size_t>(i)])
                             : made_sample(kJudgeSeed + static_cast<std::uint64_t>(i)));
    }
  }

  std::string name() const override { return "gnn"; }
  const trainer::Settings& settings() const override { return settings_; }
  std::vector<std::string> data_files() const override {
    return own_ ? own_->files : std::vector<std::string>();
  }
  std::int64_t num_steps() const override {
    return settings_.epochs > 0 ? settings_.epochs * steps_per_epoch() : settings_.num_steps;
  }
  std::string longer() const override {
    if (settings_.epochs == 0) return Workload::longer();
    return "--epochs N goes on up to the end of epoch N";
  }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  void add_state(checkpoint::State& state) override {
    checkpoint::add_module(state, model_.module());
    checkpoint::add_optimizer(state, *optimizer_, *model_.module());
    if (!own_) return;
    state.add_replicated("atomic_energies", own_->atomic_energies);
    state.values[kSpecies] = joined(own_->species);
  }
  std::vector<at::Tensor> parameters() const override { return model_.parameters(); }
  std::vector<trainer::Mark> marks() const override {
    std::vector<trainer::Mark> all{{"structures_per_step", settings_.batch * data_.size(), "",
                                    " structures per step over all ranks"},
                                   {"seed", settings_.seed, "seed "}};
    if (own_) all.push_back({"types", num_types(), "", " species of atoms"});
    return all;
  }

  Batch read(std::int64_t step) override {
    Batch batch;
    for (std::int64_t i = 0; i < settings_.batch; ++i) {
      const std::int64_t place = step * settings_.batch + i;
      batch.push_back(&training_[in_order(place)]);
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
    // Errors of energy, forces and stress, and how many structures have each.
    at::Tensor sums = at::zeros({2, 3}, at::kDouble);
    for (const Sample& sample : judged_) {
      const Structure& known = sample.structure;
      const Prediction prediction = model_.module()->model().predict(
          sample.graph, known.positions, known.box.cell, known.stress.defined(), false);
      const auto add = [&sums](int what, const at::Tensor& found, const at::Tensor& wanted,
                               double parts) {
        if (!wanted.defined()) return;
        sums[0][what] += ((found - wanted).abs().mean() / parts).detach().cpu();
        sums[1][what] += 1;
      };
      add(0, prediction.energy + model_.module()->lone_energy(sample), known.energy,
          static_cast<double>(known.num_atoms()));
      add(1, prediction.forces, known.forces, 1);
      add(2, prediction.stress, known.stress, 1);
    }
    comm::all_reduce_(sums, data_);
    const char* names[] = {"energy_error", "force_error", "stress_error"};
    trainer::Figures figures;
    for (int what = 0; what < 3; ++what) {
      const double count = sums[1][what].item<double>();
      if (count > 0) figures.emplace_back(names[what], sums[0][what].item<double>() / count);
    }
    return figures;
  }

  /// What is judged as extended XYZ, with energies, forces and, of boxes, stress as predicted.
  /// Collective; all structures must be on this rank.
  std::string predicted() {
    std::string text;
    for (std::size_t i = 0; i < judged_.size(); ++i) {
      const Sample& sample = judged_[i];
      const XyzFrame& frame = own_->judged[i];
      const Prediction found = model_.module()->model().predict(
          sample.graph, sample.structure.positions, sample.structure.box.cell,
          frame.cell.has_value(), false);
      const auto numbers = [](const at::Tensor& tensor) {
        const at::Tensor plain = tensor.detach().to(at::kCPU, at::kDouble).contiguous();
        return std::vector<double>(plain.const_data_ptr<double>(),
                                   plain.const_data_ptr<double>() + plain.numel());
      };
      XyzFrame told = frame;
      told.energy = found.energy.item<double>() + model_.module()->lone_energy(sample);
      told.forces = numbers(found.forces);
      told.stress.reset();
      if (found.stress.defined()) {
        const std::vector<double> stress = numbers(found.stress);
        std::copy(stress.begin(), stress.end(), told.stress.emplace().begin());
      }
      text += extended_xyz(told);
    }
    return text;
  }

  std::string unit() const override { return "atoms"; }
  double units_per_step() const override {
    return mean_atoms() * static_cast<double>(settings_.batch * data_.size());
  }
  std::string introduction() override {
    char text[160];
    std::snprintf(text, sizeof(text), "structures %ld of %.4g atoms | data %d x graph %d | %s\n",
                  static_cast<long>(num_structures()), mean_atoms(), data_.size(), graph_.size(),
                  settings_.partition.c_str());
    return text + labels_line() + species_line();
  }
  std::string verdict(const trainer::Figures& after) const override {
    std::string all;
    for (std::size_t i = 0; i < after.size(); ++i) {
      std::string words = after[i].first;
      std::replace(words.begin(), words.end(), '_', ' ');
      char text[96];
      std::snprintf(text, sizeof(text), "%s %.4f%s, was %.4f", words.c_str(), after[i].second,
                    after[i].first == "energy_error" ? " per atom" : "", before_[i].second);
      all += (i > 0 ? " | " : "") + std::string(text);
    }
    return all + "\n";
  }
  std::int64_t num_judged() const { return std::ssize(judged_); }
  trainer::Figures results() const override {
    trainer::Figures all{{"parameters", static_cast<double>(model_.parameters()[0].numel())},
                         {"halo_rows", halo_rows_}};
    for (const auto& [name, value] : before_) all.emplace_back(name + "_before", value);
    return all;
  }

 private:
  std::int64_t num_types() const {
    return own_ ? std::ssize(own_->species) : ModelOptions().num_types;
  }
  std::int64_t num_structures() const {
    return own_ ? std::ssize(own_->training) : settings_.num_structures;
  }
  double mean_atoms() const {
    return own_ ? own_->mean_atoms() : static_cast<double>(settings_.num_atoms);
  }

  // Of the rank that has most of them.
  std::int64_t steps_per_epoch() const {
    const std::int64_t most = (num_structures() + data_.size() - 1) / data_.size();
    return (most + settings_.batch - 1) / settings_.batch;
  }

  // Which structure of this rank comes at a place: a function of the place alone, so that a run can
  // go on anywhere.
  std::size_t in_order(std::int64_t place) {
    const std::int64_t count = std::ssize(training_);
    if (!settings_.shuffle) return static_cast<std::size_t>(place % count);
    if (const std::int64_t round = place / count; round != shuffled_round_) {
      std::seed_seq seeds{settings_.seed, round};
      std::mt19937_64 numbers(seeds);
      order_.resize(training_.size());
      std::iota(order_.begin(), order_.end(), std::size_t{0});
      for (std::size_t i = order_.size(); i > 1; --i)
        std::swap(order_[i - 1], order_[numbers() % i]);
      shuffled_round_ = round;
    }
    return order_[static_cast<std::size_t>(place % count)];
  }

  // What can be learned, and what it is judged by.
  std::string labels_line() const {
    if (!own_) return "";
    return "labels   " + labels_text(own_->training) + "\n         judged by " +
           labels_text(own_->judged) + "\n";
  }

  // What the energies of lone atoms were taken to be.
  std::string species_line() const {
    if (!own_) return "";
    std::string text = "species ";
    for (std::size_t i = 0; i < own_->species.size(); ++i) {
      char one[64];
      std::snprintf(one, sizeof(one), " %.8s %.6g", own_->species[i].c_str(),
                    own_->atomic_energies.const_data_ptr<double>()[i]);
      text += (i > 0 ? "," : "") + std::string(one);
    }
    text += " (energy of a lone atom, by least squares)\n";
    if (const std::string unseen = unseen_species(*own_); !unseen.empty()) {
      text += "unknown  " + unseen + ": in what is judged, but in nothing that is trained on\n";
    }
    return text;
  }

  Sample made_sample(std::uint64_t seed) const {
    StructureOptions options;
    options.num_atoms = settings_.num_atoms;
    options.cutoff = settings_.cutoff;
    return make_sample(make_structure(options, seed));
  }
  Sample own_sample(const XyzFrame& frame) const {
    Sample sample = make_sample(structure_of(frame, *own_, settings_.cutoff));
    sample.counts = counts_of(frame, *own_);
    return sample;
  }

  Sample make_sample(Structure structure) const {
    const auto partition = make_partition(settings_.partition, structure.positions, structure.box,
                                          structure.neighbours.edge_index, graph_.size());
    LocalGraph graph = make_local_graph(structure, partition, graph_);
    const at::Device device = trainer::device_of(settings_);
    for (at::Tensor* tensor :
         {&structure.positions, &structure.box.cell, &structure.energy, &structure.forces,
          &structure.stress, &graph.nodes, &graph.types, &graph.edges, &graph.shifts}) {
      if (tensor->defined()) *tensor = tensor->to(device);
    }
    return {std::move(structure), std::move(graph), {}};
  }

  const Settings& settings_;
  comm::Mesh mesh_;
  comm::Group data_;
  comm::Group graph_;
  std::optional<OwnStructures> own_;
  data_parallel::DistributedDataParallel<Net> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::vector<Sample> training_;
  std::int64_t shuffled_round_ = -1;  // of `order_`; the reader's
  std::vector<std::size_t> order_;
  std::vector<Sample> judged_;
  trainer::Figures before_;
  double halo_rows_ = 0;
};

}  // namespace

std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world) {
  std::optional<OwnStructures> own;
  if (!settings.data.empty()) own = read_structures(settings);
  return std::make_unique<Training>(settings, std::move(own), world);
}

Judged judge(const Settings& settings, const std::string& data, const std::string& checkpoints,
             std::int64_t step, bool predicts, const comm::Group& world) {
  Settings own = settings;
  own.graph_parallel = 0;
  std::optional<OwnStructures> structures;
  if (!data.empty()) {
    const std::vector<std::string> species = species_of(checkpoints, step);
    if (species.empty()) {
      throw trainer::DataError(data +
                               ": the run learned from structures that the program made, whose "
                               "atoms are of no element.");
    }
    structures = read_to_judge(own, data, species, /*needs_labels=*/!predicts);
  } else if (!own.data.empty()) {
    structures = read_structures(own);
  }
  Training training(own, std::move(structures), world);
  Judged judged{trainer::judge(training, world, checkpoints, step), training.num_judged(), ""};
  if (predicts) judged.predicted = training.predicted();
  return judged;
}

}  // namespace tessera::workloads::gnn
