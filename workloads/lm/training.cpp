#include "lm/training.h"

#include <torch/optim/adamw.h>

#include "lm/gpt.h"
#include "lm/text_source.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "trainer/device.h"

namespace tessera::workloads::lm {
namespace {

struct MeshShape {
  int data = 1;
  int vocab = 1;
};

MeshShape mesh_shape(const Settings& settings, int ranks) {
  MeshShape shape{settings.data_ranks_wanted, settings.vocab_ranks_wanted};
  if (shape.data == 0 && shape.vocab == 0) shape.data = 1;
  if (shape.data == 0 && shape.vocab > 0) shape.data = ranks / shape.vocab;
  if (shape.vocab == 0 && shape.data > 0) shape.vocab = ranks / shape.data;
  TESSERA_CHECK_VALUE(shape.data > 0 && shape.vocab > 0 && shape.data * shape.vocab == ranks,
                      "lm: ", ranks, " ranks cannot form a mesh of ", shape.data, " data and ",
                      shape.vocab, " vocabulary ranks.");
  TESSERA_CHECK_VALUE(settings.batch > 0 && settings.batch % shape.data == 0, "lm: a batch of ",
                      settings.batch, " sequences cannot be divided over ", shape.data,
                      " data ranks.");
  return shape;
}

comm::Mesh make_mesh(const Settings& settings, const comm::Group& world) {
  const MeshShape shape = mesh_shape(settings, world.size());
  return {world, {{"data", shape.data}, {"vocab", shape.vocab}}};
}

GptOptions model_options(const Settings& settings) {
  GptOptions model;
  model.vocab_size = TextSource::kVocabSize;
  model.length = settings.length;
  model.layers = settings.num_layers;
  model.heads = settings.num_heads;
  model.width = settings.width;
  model.seed = static_cast<std::uint64_t>(settings.seed);
  return model;
}

std::shared_ptr<Gpt> make_model(const Settings& settings, const comm::Group& vocab) {
  auto model = std::make_shared<Gpt>(model_options(settings), vocab);
  model->to(trainer::device_of(settings));
  return model;
}

class Training final : public trainer::Workload<at::Tensor> {
 public:
  Training(const Settings& settings, const comm::Group& world)
      : settings_(settings),
        mesh_(make_mesh(settings, world)),
        text_(settings.file.empty() ? TextSource(own_source_text())
                                    : TextSource::from_file(settings.file)),
        // The same on all data ranks that hold one part of the vocabulary.
        model_(make_model(settings, mesh_.group("vocab")), mesh_.group("data"),
               {.gradient_as_bucket_view = true}),
        optimizer_(model_.parameters(), torch::optim::AdamWOptions(settings.learning_rate)) {}

  std::string name() const override { return "lm"; }
  std::vector<std::string> data_files() const override {
    if (settings_.file.empty()) return {};
    return {settings_.file};
  }
  const trainer::Settings& settings() const override { return settings_; }

  torch::optim::Optimizer& optimizer() override { return optimizer_; }
  void add_state(checkpoint::State& state) override {
    for (checkpoint::PlacedTensor placed : model_.module()->placed_parameters()) {
      placed.name = "model." + placed.name;
      for (checkpoint::Piece& piece : placed.pieces) piece.tensor = piece.tensor.detach();
      state.add(std::move(placed));
    }
    checkpoint::add_optimizer(state, optimizer_, model_.module()->placed_parameters());
  }
  std::vector<at::Tensor> parameters() const override { return model_.parameters(); }
  std::vector<trainer::Mark> marks() const override {
    return {{"batch", settings_.batch, "batch "},
            {"length", settings_.length, "length "},
            {"seed", settings_.seed, "seed "}};
  }
  comm::Group saving_group(const comm::Group& /*world*/) const override {
    return mesh_.group("vocab");
  }
  bool saves() const override { return mesh_.group("data").rank() == 0; }

  at::Tensor read(std::int64_t step) override {
    const comm::Group& data = mesh_.group("data");
    const std::int64_t share = settings_.batch / data.size();
    return text_.sequences(static_cast<std::uint64_t>(settings_.seed), step, data.rank() * share,
                           share, settings_.length);
  }
  Result forward(const at::Tensor& tokens, const Inputs& /*inputs*/) override {
    const core::Span span(core::Phase::kDense);
    return {model_(tokens), {}};
  }

  std::string unit() const override { return "tokens"; }
  double units_per_step() const override {
    return static_cast<double>(settings_.batch * settings_.length);
  }

 private:
  const Settings& settings_;
  comm::Mesh mesh_;
  TextSource text_;
  data_parallel::DistributedDataParallel<Gpt> model_;
  torch::optim::AdamW optimizer_;
};

}  // namespace

std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world) {
  return std::make_unique<Training>(settings, world);
}

}  // namespace tessera::workloads::lm
