// Times a batch of tables on the GPU beside a plain gather of random rows; one line of JSON per
// row.
//
// 64 tables of 1,000,000 rows of 128 numbers, 8192 samples, 20 ids a sample, four batches in turn.
// Bytes that must move: forward reads the rows and writes the output; backward reads and writes
// each row that occurs, its state and reads the gradient of the output once. The gather reads and
// writes as many rows as there are ids.

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "tessera/embedding/table_batch.h"

namespace tessera::bench {

int row_gather(const void* table, const std::int64_t* rows, std::int64_t count, int row_bytes,
               void* output, void* stream);

namespace {

using namespace embedding;

constexpr std::int64_t kTables = 64;
constexpr std::int64_t kRows = 1'000'000;
constexpr std::int64_t kColumns = 128;
constexpr std::int64_t kBatch = 8192;
constexpr std::int64_t kBag = 20;
constexpr std::int64_t kIds = kTables * kBatch * kBag;

std::vector<double> milliseconds(int count, const std::function<void(int)>& prepare,
                                 const std::function<void(int)>& call) {
  cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<double> times;
  for (int i = 0; i < count + 3; ++i) {
    prepare(i);
    cudaEventRecord(begin, stream);
    call(i);
    cudaEventRecord(end, stream);
    cudaEventSynchronize(end);
    float time = 0;
    cudaEventElapsedTime(&time, begin, end);
    if (i >= 3) times.push_back(time);
  }
  std::sort(times.begin(), times.end());
  return times;
}

double print(const std::string& name, const std::vector<double>& times, double bytes,
             double gather_rate) {
  const double median = times[times.size() / 2];
  const double rate = bytes / median / 1e6;
  std::printf(
      "{\"name\": \"embedding_cuda/%s\", \"device\": \"cuda\", \"median_us\": %.1f, \"p10_us\": "
      "%.1f, \"p90_us\": %.1f, \"bytes\": %.0f, \"repetitions\": %zu, \"gbps\": %.0f, "
      "\"share_of_gather\": %.3f}\n",
      name.c_str(), median * 1e3, times[times.size() / 10] * 1e3,
      times[times.size() * 9 / 10] * 1e3, bytes, times.size(), rate,
      gather_rate > 0 ? rate / gather_rate : 1.0);
  std::fflush(stdout);
  return rate;
}

void run(at::ScalarType type, const char* type_name, bool is_hot) {
  const auto device = at::TensorOptions().device(at::kCUDA);
  std::vector<Table> tables;
  std::vector<Feature> features;
  for (std::int64_t i = 0; i < kTables; ++i) {
    const std::string name = std::string("t").append(std::to_string(i));
    tables.push_back(
        {name, at::empty({kRows, kColumns}, device.dtype(type)).uniform_(-0.01, 0.01)});
    features.push_back({name, i});
  }
  const TableBatch batch(tables, features,
                         {.gradients = GradientForm::kFused,
                          .optimizer = {.kind = OptimizerKind::kRowWiseAdagrad},
                          .bounds_check = BoundsCheckMode::kIgnore});
  std::vector<LookupInput> inputs(4);
  std::vector<double> unique_rows;
  for (LookupInput& input : inputs) {
    input.ids = at::randint(kRows, {kIds}, device.dtype(at::kLong));
    if (is_hot) {  // half of the ids fall on few rows, the more often the smaller they are
      const at::Tensor few = at::rand({kIds}, device).pow(8).mul(1e5).to(at::kLong);
      input.ids = at::where(at::rand({kIds}, device) < 0.5, few, input.ids).contiguous();
    }
    input.offsets = at::arange(0, kIds + 1, kBag, device.dtype(at::kLong));
    const at::Tensor base =
        at::arange(kTables, device.dtype(at::kLong)).repeat_interleave(kBatch * kBag) * kRows;
    unique_rows.push_back(static_cast<double>(std::get<0>(at::_unique(input.ids + base)).numel()));
  }
  const auto row_bytes = static_cast<double>(kColumns * tables[0].weight.element_size());
  const std::string end = std::string("/").append(type_name).append(is_hot ? "_hot" : "_uniform");

  double gather_rate = 0;
  {
    // Rows of one table of the same bytes as all of them: random over the whole memory they take.
    const std::int64_t half = kIds / 2;
    const at::Tensor output = at::empty({half, kColumns}, device.dtype(type));
    std::vector<at::Tensor> rows;
    for (int i = 0; i < 4; ++i) {
      rows.push_back(at::randint(kRows, {half}, device.dtype(at::kLong)));
    }
    const auto times = milliseconds(
        20, [](int) {},
        [&](int i) {
          // One table after another, as the lookups go.
          for (std::int64_t t = 0; t < 8; ++t) {
            row_gather(
                tables[static_cast<std::size_t>((i * 8 + t) % kTables)].weight.const_data_ptr(),
                rows[i % 4].const_data_ptr<std::int64_t>() + t * half / 8, half / 8,
                static_cast<int>(row_bytes),
                static_cast<char*>(output.data_ptr()) +
                    static_cast<std::int64_t>(row_bytes) * t * half / 8,
                c10::cuda::getCurrentCUDAStream().stream());
          }
        });
    gather_rate = print("gather" + end, times, 2.0 * static_cast<double>(half) * row_bytes, 0);
  }
  at::Tensor output = at::empty({kBatch, kTables * kColumns}, device.dtype(at::kFloat));
  const double output_bytes = static_cast<double>(output.nbytes());
  print("forward" + end,
        milliseconds(
            20, [](int) {}, [&](int i) { batch.pooled_out(inputs[i % 4], output); }),
        static_cast<double>(kIds) * (row_bytes + 8) + output_bytes, gather_rate);
  const at::Tensor grad = at::rand_like(output).sub_(0.5);
  at::Tensor result;
  double unique = 0;
  for (const double count : unique_rows) unique += count / 4;
  print("backward_rowwise_adagrad" + end,
        milliseconds(
            20, [&](int i) { result = batch.pooled(inputs[i % 4]); },
            [&](int) { result.backward(grad); }),
        unique * (2 * row_bytes + 64) + output_bytes + 8.0 * static_cast<double>(kIds),
        gather_rate);
}

}  // namespace
}  // namespace tessera::bench

int main() {
  tessera::bench::run(at::kFloat, "fp32", false);
  tessera::bench::run(at::kFloat, "fp32", true);
  tessera::bench::run(at::kBFloat16, "bf16", false);
  tessera::bench::run(at::kBFloat16, "bf16", true);
  return 0;
}
