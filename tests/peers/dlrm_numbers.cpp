// dlrm_numbers FILE — what the DLRM workload computes on drawn inputs, with the inputs, for
// test_torchrec_dlrm.py to compute again with torchrec. A dictionary that torch.load reads.

#include <cstdio>
#include <exception>
#include <fstream>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "dlrm/metrics.h"
#include "dlrm/model.h"

namespace {

using namespace tessera::workloads;
using Named = c10::Dict<std::string, at::Tensor>;

void add_model(Named& all, const std::string& name, dlrm::Interaction interaction) {
  constexpr std::int64_t kBatch = 7;
  dlrm::DlrmOptions options;
  options.num_dense = 5;
  options.features = {"a", "b", "c"};
  options.embedding_dim = 4;
  options.bottom = {6, 4};
  options.top = {8, 3, 1};
  options.interaction = interaction;
  options.cross_layers = 2;
  options.cross_rank = 3;
  dlrm::Dlrm model(options);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(11);
  const at::Tensor dense = at::randn({kBatch, options.num_dense}, generator);
  const at::Tensor rows = at::randn({kBatch, 3 * options.embedding_dim}, generator);
  rows.requires_grad_(true);
  const at::Tensor logits =
      model.forward(dense, tessera::jagged::KeyedTensor(options.features, {4, 4, 4}, rows));
  at::arange(1, kBatch + 1, at::kFloat).mul(logits).sum().backward();
  all.insert(name + ".dense", dense);
  all.insert(name + ".rows", rows.detach());
  all.insert(name + ".logits", logits.detach());
  all.insert(name + ".rows_grad", rows.grad());
  for (const auto& parameter : model.named_parameters()) {
    all.insert(name + ".parameter." + parameter.key(), parameter.value().detach());
    all.insert(name + ".gradient." + parameter.key(), parameter.value().grad());
  }
}

void add_metrics(Named& all) {
  constexpr std::int64_t kSamples = 5000;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(13);
  // In eighths, so that there are ties.
  const at::Tensor logits = (at::randn({kSamples}, generator) * 8).round() / 8 - 0.5;
  const at::Tensor labels =
      (at::rand({kSamples}, generator) < (logits * 0.7 - 0.2).sigmoid()).to(at::kFloat);
  const std::span<const float> scores(logits.const_data_ptr<float>(), kSamples);
  const std::span<const float> clicks(labels.const_data_ptr<float>(), kSamples);
  dlrm::ClickSums sums;
  sums.add(scores, clicks);
  dlrm::StreamingAuc streaming;
  streaming.add(scores, clicks);
  all.insert("metrics.logits", logits);
  all.insert("metrics.labels", labels);
  const std::pair<const char*, double> values[] = {
      {"log_loss", sums.log_loss()},        {"normalised_entropy", sums.normalised_entropy()},
      {"calibration", sums.calibration()},  {"auc", dlrm::exact_auc(scores, clicks)},
      {"streaming_auc", streaming.value()}, {"streaming_error", streaming.error()}};
  for (const auto& [name, value] : values) {
    all.insert(std::string("metrics.") + name, at::scalar_tensor(value, at::kDouble));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "dlrm_numbers: name the file to write\n");
    return 2;
  }
  try {
    Named all;
    add_model(all, "dot", dlrm::Interaction::kDot);
    add_model(all, "cross", dlrm::Interaction::kCross);
    add_metrics(all);
    const std::vector<char> bytes = torch::jit::pickle_save(all);
    std::ofstream file(argv[1], std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.flush();
    return file ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "dlrm_numbers: %s\n", error.what());
    return 1;
  }
}
