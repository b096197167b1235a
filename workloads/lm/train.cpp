#include "lm/train.h"

#include <chrono>

#include <torch/optim/adamw.h>

#include "lm/checkpoints.h"
#include "lm/text_source.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/check.h"

namespace tessera::workloads {
namespace {

struct MeshShape {
  int data = 1;
  int vocab = 1;
};

MeshShape mesh_shape(const LmOptions& options, int ranks) {
  MeshShape shape{options.data_ranks, options.vocab_ranks};
  if (shape.data == 0 && shape.vocab == 0) shape.data = 1;
  if (shape.data == 0 && shape.vocab > 0) shape.data = ranks / shape.vocab;
  if (shape.vocab == 0 && shape.data > 0) shape.vocab = ranks / shape.data;
  TESSERA_CHECK_VALUE(shape.data > 0 && shape.vocab > 0 && shape.data * shape.vocab == ranks,
                      "lm: ", ranks, " ranks cannot form a mesh of ", shape.data, " data and ",
                      shape.vocab, " vocabulary ranks.");
  TESSERA_CHECK_VALUE(options.batch > 0 && options.batch % shape.data == 0, "lm: a batch of ",
                      options.batch, " sequences cannot be divided over ", shape.data,
                      " data ranks.");
  return shape;
}

/// Averages the gradients over the data ranks in one message.
void average_gradients(const std::vector<torch::Tensor>& parameters, const comm::Group& group) {
  if (group.size() == 1) return;
  std::vector<torch::Tensor> flat;
  for (const auto& parameter : parameters) flat.push_back(parameter.grad().reshape(-1));
  torch::Tensor all = torch::cat(flat);
  comm::all_reduce_(all, group, comm::Reduction::kAvg);
  std::int64_t first = 0;
  for (const auto& parameter : parameters) {
    parameter.grad().copy_(all.narrow(0, first, parameter.numel()).view(parameter.sizes()));
    first += parameter.numel();
  }
}

}  // namespace

double train_lm(const LmOptions& options, const comm::Group& world,
                const std::function<void(const LmProgress&)>& report,
                const std::function<void(std::int64_t)>& started) {
  const MeshShape shape = mesh_shape(options, world.size());
  const comm::Mesh mesh(world, {{"data", shape.data}, {"vocab", shape.vocab}});
  const comm::Group& data = mesh.group("data");
  const TextSource text =
      options.file.empty() ? TextSource(own_source_text()) : TextSource::from_file(options.file);
  GptOptions model_options = options.model;
  model_options.vocab_size = TextSource::kVocabSize;
  Gpt model(model_options, mesh.group("vocab"));
  torch::optim::AdamW optimizer(model.parameters(),
                                torch::optim::AdamWOptions(options.learning_rate));
  const std::int64_t share = options.batch / shape.data;
  LmProgress progress;
  LmCheckpoints checkpoints(options, model, optimizer, mesh, world);
  LmCheckpoints::Place place;
  if (options.resume) place = checkpoints.load();
  progress.step = place.step;
  progress.loss = place.loss;
  if (started) started(place.step);
  for (std::int64_t step = place.step; step < options.steps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    const torch::Tensor tokens =
        text.sequences(options.model.seed, step, data.rank() * share, share, model_options.length);
    optimizer.zero_grad();
    const torch::Tensor loss = model.loss(tokens);
    loss.backward();
    average_gradients(model.parameters(), data);
    optimizer.step();
    const torch::Tensor mean = comm::all_reduce(loss.detach(), data, comm::Reduction::kAvg);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    progress.step = step + 1;
    progress.loss = mean.item<double>();
    progress.milliseconds = seconds * 1e3;
    progress.tokens_per_second =
        static_cast<double>(options.batch * model_options.length) / seconds;
    report(progress);
    const bool is_due = step + 1 == options.steps || (options.checkpoint_every > 0 &&
                                                      (step + 1) % options.checkpoint_every == 0);
    if (is_due && !options.checkpoints.empty()) checkpoints.save(step + 1, progress.loss);
  }
  return progress.loss;
}

}  // namespace tessera::workloads
