// tessera-worker train-gnn — one rank of `tessera train gnn`.

#include <algorithm>
#include <cstdio>
#include <thread>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "../gnn_flags.h"
#include "gnn/training.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/mesh.h"
#include "worker/progress_line.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

using workloads::gnn::Progress;
using workloads::gnn::Summary;
using workloads::gnn::TrainingOptions;

TrainingOptions options_from(const TrainGnnWords& words) {
  TrainingOptions options;
  options.model.num_features = words.num_features;
  options.model.num_layers = words.num_layers;
  options.model.cutoff = words.cutoff;
  options.model.overlap = !words.no_overlap;
  options.model.dtype = words.precision == "float64" ? at::kDouble : at::kFloat;
  options.structure.num_atoms = words.num_atoms;
  options.num_structures = words.num_structures;
  options.num_steps = words.num_steps;
  options.batch = words.batch;
  options.learning_rate = words.learning_rate;
  options.force_weight = words.force_weight;
  options.partition = words.partition;
  options.optimizer = words.optimizer;
  options.seed = static_cast<std::uint64_t>(words.seed);
  return options;
}

std::string short_number(double number) {
  char text[32];
  if (number >= 1e6) {
    std::snprintf(text, sizeof(text), "%.1fM", number / 1e6);
  } else if (number >= 1e3) {
    std::snprintf(text, sizeof(text), "%.1fk", number / 1e3);
  } else {
    std::snprintf(text, sizeof(text), "%.0f", number);
  }
  return text;
}

class GnnProgress {
 public:
  explicit GnnProgress(std::int64_t num_steps) : num_steps_(num_steps), line_(num_steps) {}

  void operator()(const Progress& progress) {
    mean_seconds_ =
        progress.step == 1 ? progress.seconds : 0.9 * mean_seconds_ + 0.1 * progress.seconds;
    if (!line_.is_due(progress.step)) return;
    const double left = mean_seconds_ * static_cast<double>(num_steps_ - progress.step);
    char text[160];
    std::snprintf(text, sizeof(text),
                  "step %5ld/%ld | loss %.4g | %s atoms/s | %.1f ms | eta %.0fs",
                  static_cast<long>(progress.step), static_cast<long>(num_steps_), progress.loss,
                  short_number(progress.atoms_per_second).c_str(), 1e3 * progress.seconds, left);
    line_.show(progress.step, text);
  }

 private:
  std::int64_t num_steps_;
  ProgressLine line_;
  double mean_seconds_ = 0;
};

void print_summary(const Summary& summary, bool as_json) {
  if (as_json) {
    const nlohmann::ordered_json json{{"parameters", summary.num_parameters},
                                      {"halo_rows", summary.halo_rows},
                                      {"energy_error_before", summary.before.energy_per_atom},
                                      {"force_error_before", summary.before.force},
                                      {"energy_error", summary.after.energy_per_atom},
                                      {"force_error", summary.after.force}};
    std::printf("%s\n", json.dump().c_str());
    return;
  }
  std::printf("energy error %.4f per atom, was %.4f | force error %.4f, was %.4f\n",
              summary.after.energy_per_atom, summary.before.energy_per_atom, summary.after.force,
              summary.before.force);
}

int train(const TrainGnnWords& words) {
  const comm::Group world = comm::init();
  const int size = words.graph_parallel == 0 ? world.size() : words.graph_parallel;
  const comm::Mesh mesh(world, {{"data", world.size() / size}, {"graph", size}});
  const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(std::max(1, num_cores / world.size()));
  const TrainingOptions options = options_from(words);
  const bool is_speaker = world.rank() == 0;
  if (is_speaker && !words.as_json) {
    std::printf("structures %ld of %ld atoms | data %d x graph %d | %s\n",
                static_cast<long>(options.num_structures),
                static_cast<long>(options.structure.num_atoms), world.size() / size, size,
                options.partition.c_str());
    std::fflush(stdout);
  }
  GnnProgress line(options.num_steps);
  std::function<void(const Progress&)> report;
  if (is_speaker && !words.as_json) report = [&line](const Progress& progress) { line(progress); };
  const Summary summary =
      comm::guarded([&] { return workloads::gnn::train(options, mesh, report); });
  if (is_speaker) print_summary(summary, words.as_json);
  return 0;
}

int train_gnn(const std::vector<std::string>& words) {
  CLI::App app("", "train-gnn");
  TrainGnnWords given;
  define_flags(app, given);
  std::vector<std::string> reversed(words.rbegin(), words.rend());
  app.parse(reversed);
  return train(given);
}

}  // namespace

const WorkerVerb kTrainGnnVerb{"train-gnn", train_gnn};

}  // namespace tessera::cli
