#include "lm/training.h"

#include <cmath>
#include <cstdio>
#include <optional>
#include <random>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <nlohmann/json.hpp>

#include "lm/gpt.h"
#include "lm/text_source.h"
#include "lm/tokenizer.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/mesh.h"
#include "tessera/core/check.h"
#include "tessera/core/step_recorder.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "trainer/data_error.h"
#include "trainer/device.h"
#include "trainer/permutation.h"

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

GptOptions model_options(const Settings& settings, std::int64_t vocab_size) {
  GptOptions model;
  model.vocab_size = vocab_size;
  model.length = settings.length;
  model.layers = settings.num_layers;
  model.heads = settings.num_heads;
  model.width = settings.width;
  model.seed = static_cast<std::uint64_t>(settings.seed);
  return model;
}

std::shared_ptr<Gpt> make_model(const Settings& settings, std::int64_t vocab_size,
                                const comm::Group& vocab) {
  auto model = std::make_shared<Gpt>(model_options(settings, vocab_size), vocab);
  model->to(trainer::device_of(settings));
  return model;
}

// What is trained on, and what is judged on, if the text is long enough for both.
struct Texts {
  TextSource training;
  std::optional<TextSource> judged;
};

Texts texts_of(const Settings& settings, const Tokenizer* tokenizer) {
  const auto read = [&](const std::string& file) {
    return file.empty() ? TextSource(own_source_text(), tokenizer)
                        : TextSource::from_file(file, tokenizer);
  };
  TextSource whole = read(settings.file);
  if (!settings.eval_file.empty()) return {std::move(whole), read(settings.eval_file)};
  const std::int64_t begin = whole.size() - whole.size() / 10;
  const std::int64_t num_judged = whole.size() - begin;
  if (num_judged > settings.length + 1) {
    return {whole.part(0, begin), whole.part(begin, whole.size())};
  }
  const char* wish = settings.sample > 0       ? "--sample"
                     : settings.patience > 0   ? "--patience"
                     : settings.eval_every > 0 ? "--eval-every"
                                               : nullptr;
  if (wish == nullptr) return {std::move(whole), std::nullopt};
  throw trainer::DataError(settings.file + ": its last tenth has " + std::to_string(num_judged) +
                           " tokens, too few to judge on by sequences of " +
                           std::to_string(settings.length + 1) + ", and " + wish +
                           " is for evaluations. Name another text with --eval-file, or use a "
                           "smaller --length.");
}

// A token by its probability; the same on all ranks for the same numbers drawn.
std::int64_t drawn(const at::Tensor& logits, double temperature, double uniform) {
  const at::Tensor wide = logits.to(at::kCPU, at::kDouble);
  if (temperature <= 0) return wide.argmax().item<std::int64_t>();
  const at::Tensor sums = at::softmax(wide / temperature, 0).cumsum(0);
  const auto place =
      at::searchsorted(sums, at::scalar_tensor(uniform * sums[-1].item<double>(), at::kDouble));
  return std::min(place.item<std::int64_t>(), wide.numel() - 1);
}

// What is no UTF-8, such as a letter that is cut off, becomes a mark for that.
std::string as_utf8(const std::string& bytes) {
  using Json = nlohmann::json;
  return Json::parse(Json(bytes).dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::string in_one_line(const std::string& text) {
  std::string line;
  for (const char c : text) {
    if (c == '\n') {
      line += "\\n";
    } else if (static_cast<unsigned char>(c) >= ' ' && c != '\x7f') {
      line += c;
    } else {
      line += c == '\t' ? "\\t" : "?";
    }
  }
  return line;
}

class Training final : public trainer::Workload<at::Tensor> {
 public:
  Training(const Settings& settings, const comm::Group& world)
      : settings_(settings),
        mesh_(make_mesh(settings, world)),
        tokenizer_(settings.tokenizer.empty()
                       ? std::nullopt
                       : std::optional(Tokenizer::from_file(settings.tokenizer))),
        texts_(texts_of(settings, tokenizer_ ? &*tokenizer_ : nullptr)),
        // The same on all data ranks that hold one part of the vocabulary.
        model_(make_model(settings, vocab_size(), mesh_.group("vocab")), mesh_.group("data"),
               {.gradient_as_bucket_view = true}),
        optimizer_(model_.parameters(), torch::optim::AdamWOptions(settings.learning_rate)) {}

  std::string name() const override { return "lm"; }
  std::vector<std::string> data_files() const override {
    std::vector<std::string> files;
    for (const std::string& name : {settings_.file, settings_.eval_file, settings_.tokenizer}) {
      if (!name.empty()) files.push_back(name);
    }
    return files;
  }
  const trainer::Settings& settings() const override { return settings_; }
  std::int64_t num_steps() const override {
    if (settings_.epochs == 0) return settings_.num_steps;
    const std::int64_t pieces = settings_.epochs * texts_.training.num_pieces(settings_.length);
    return (pieces + settings_.batch - 1) / settings_.batch;
  }
  std::string longer() const override {
    if (settings_.epochs == 0) return Workload::longer();
    return "--epochs N goes on up to the end of epoch N";
  }

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
    const std::int64_t first = data.rank() * share;
    if (settings_.epochs > 0) {
      return texts_.training.pieces(in_order(step * settings_.batch + first, share),
                                    settings_.length);
    }
    return texts_.training.sequences(static_cast<std::uint64_t>(settings_.seed), step, first, share,
                                     settings_.length);
  }
  Result forward(const at::Tensor& tokens, const Inputs& /*inputs*/) override {
    const core::Span span(core::Phase::kDense);
    return {model_(tokens), {}};
  }

  /// The same sequences every time.
  trainer::Figures evaluate() override {
    if (!texts_.judged) return {};
    const torch::NoGradGuard guard;
    const comm::Group& data = mesh_.group("data");
    const std::int64_t share = settings_.batch / data.size();
    at::Tensor sum = at::zeros({1}, at::kDouble);
    for (std::int64_t i = 0; i < settings_.eval_batches; ++i) {
      const at::Tensor tokens =
          texts_.judged->sequences(kJudgeSeed, i, data.rank() * share, share, settings_.length);
      sum += model_.module()
                 ->forward(tokens.to(trainer::device_of(settings_)))
                 .to(at::kCPU, at::kDouble);
    }
    if (data.size() > 1) comm::all_reduce_(sum, data);
    const double loss =
        sum.item<double>() / static_cast<double>(settings_.eval_batches * data.size());
    if (settings_.sample > 0) sample_ = as_utf8(written());
    return {{"validation_loss", loss}, {"perplexity", std::exp(loss)}};
  }
  std::vector<std::string> evaluation_records() override {
    if (sample_.empty()) return {};
    return {nlohmann::json{{"kind", "text"}, {"text", sample_}}.dump()};
  }
  std::string introduction() override {
    const std::string judged = texts_.judged
                                   ? std::to_string(texts_.judged->size()) + " to judge on"
                                   : "none to judge on: a tenth of it is shorter than a sequence";
    return "text     " + std::to_string(texts_.training.size()) + " tokens of " +
           std::to_string(vocab_size()) + " kinds, " + judged + "\n";
  }
  std::string verdict(const trainer::Figures& evaluation) const override {
    char text[96];
    std::snprintf(text, sizeof(text), "judged   validation loss %.4f | perplexity %.2f\n",
                  evaluation[0].second, evaluation[1].second);
    return text + (sample_.empty() ? "" : "sample   " + in_one_line(sample_) + "\n");
  }

  std::string unit() const override { return "tokens"; }
  double units_per_step() const override {
    return static_cast<double>(settings_.batch * settings_.length);
  }

 private:
  static constexpr std::uint64_t kJudgeSeed = 0x6a756467;

  std::int64_t vocab_size() const {
    return tokenizer_ ? tokenizer_->vocab_size() : TextSource::kVocabSize;
  }

  // Which pieces of the text come at places, counted over all epochs: a function of the place
  // alone, so that a run can go on anywhere and any split of a batch over ranks reads the same
  // text.
  std::vector<std::int64_t> in_order(std::int64_t first, std::int64_t count) const {
    const std::int64_t size = texts_.training.num_pieces(settings_.length);
    std::vector<std::int64_t> numbers;
    for (std::int64_t place = first; place < first + count; ++place) {
      std::int64_t number = place % size;
      if (settings_.shuffle) {
        const auto epoch = static_cast<std::uint64_t>(place / size);
        const std::uint64_t seed = static_cast<std::uint64_t>(settings_.seed) + epoch * 0x9e37U;
        number = trainer::Permutation(size, seed)(number);
      }
      numbers.push_back(number);
    }
    return numbers;
  }

  // Text that begins with the prompt. Collective: the model is over ranks.
  std::string written() {
    const std::string begin = settings_.prompt.empty() ? "\n" : settings_.prompt;
    std::vector<std::int32_t> tokens;
    if (tokenizer_) {
      tokens = tokenizer_->encode(begin);
    } else {
      for (const char c : begin) tokens.push_back(static_cast<unsigned char>(c));
    }
    std::mt19937_64 numbers(static_cast<std::uint64_t>(settings_.seed));
    for (std::int64_t i = 0; i < settings_.sample; ++i) {
      const auto length = std::min<std::int64_t>(settings_.length, std::ssize(tokens));
      const std::vector<std::int64_t> last(tokens.end() - length, tokens.end());
      const at::Tensor seen = at::tensor(last, at::kLong).to(trainer::device_of(settings_));
      const double uniform = static_cast<double>(numbers() >> 11U) * 0x1p-53;
      tokens.push_back(static_cast<std::int32_t>(
          drawn(model_.module()->next_logits(seen), settings_.temperature, uniform)));
    }
    return tokenizer_ ? tokenizer_->decode(tokens) : std::string(tokens.begin(), tokens.end());
  }

  const Settings& settings_;
  comm::Mesh mesh_;
  std::optional<Tokenizer> tokenizer_;
  Texts texts_;
  std::string sample_;  // of the last evaluation
  data_parallel::DistributedDataParallel<Gpt> model_;
  torch::optim::AdamW optimizer_;
};

}  // namespace

std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world) {
  return std::make_unique<Training>(settings, world);
}

}  // namespace tessera::workloads::lm
