// The serving library by itself, one thread: what a server can reach at most with a package, and
// what reading a request costs. bench/serving/serve_bench.py has the server's rows.
//
//   model_bench PKG [--seconds S]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "serving/infer_request.h"
#include "support/row.h"
#include "tessera/serving/model.h"

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kIds = 20;  // of each feature of a sample
constexpr int kRequests = 64;      // in turn

struct Sample {
  std::int64_t num_samples = 0;
  std::vector<float> dense;
  std::vector<std::vector<std::int64_t>> ids;
  std::vector<std::int32_t> lengths;

  Sample(const serving::ModelInfo& model, std::int64_t num_samples, std::mt19937_64& random)
      : num_samples(num_samples),
        dense(static_cast<std::size_t>(num_samples * model.num_dense), 0.5F),
        lengths(static_cast<std::size_t>(num_samples), kIds) {
    for (const auto& feature : model.features) {
      const auto num_rows = static_cast<std::uint64_t>(model.tables[feature.table].num_rows);
      auto& own = ids.emplace_back(static_cast<std::size_t>(num_samples * kIds));
      for (auto& id : own) id = static_cast<std::int64_t>(random() % num_rows);
    }
  }
  std::vector<serving::FeatureBags> bags() const {
    std::vector<serving::FeatureBags> all;
    for (const auto& own : ids) all.push_back({own, lengths, {}});
    return all;
  }
};

template <class Action>
std::vector<double> time_of(double seconds, const Action& action) {
  std::vector<double> times;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (int i = 0; i < 2 * kRequests || Clock::now() < end; ++i) {
    const auto begin = Clock::now();
    action(static_cast<std::size_t>(i % kRequests));
    const std::chrono::duration<double, std::micro> time = Clock::now() - begin;
    if (i >= kRequests) times.push_back(time.count());
  }
  std::sort(times.begin(), times.end());
  return times;
}

template <typename Numbers>
void add_input(std::string& text, const std::string& name, const char* type,
               const std::string& shape, const Numbers& numbers) {
  text += (text.back() == '[' ? "" : ",");
  text += R"({"name":")" + name + R"(","shape":[)" + shape + R"(],"datatype":")" + type +
          R"(","data":[)";
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(numbers[i]);
  }
  text += "]}";
}

std::string body_of(const serving::ModelInfo& model, const Sample& sample) {
  std::string text = R"({"inputs":[)";
  const std::string count = std::to_string(sample.num_samples);
  add_input(text, "dense", "FP32", count + "," + std::to_string(model.num_dense), sample.dense);
  for (std::size_t f = 0; f < sample.ids.size(); ++f) {
    const std::string& name = model.features[f].name;
    add_input(text, name + ".values", "INT64", std::to_string(sample.ids[f].size()), sample.ids[f]);
    add_input(text, name + ".lengths", "INT32", count, sample.lengths);
  }
  return text + "]}";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  double seconds = 1;
  if (argc > 3 && std::strcmp(argv[2], "--seconds") == 0) seconds = std::atof(argv[3]);
  serving::Model model(argv[1]);
  auto lease = model.lease();
  const serving::ModelInfo& info = lease.model();
  std::mt19937_64 random(3);
  for (const std::int64_t num_samples : {1, 64, 256}) {
    std::vector<Sample> samples;
    std::vector<std::vector<serving::FeatureBags>> bags;
    for (int i = 0; i < kRequests; ++i) samples.emplace_back(info, num_samples, random);
    for (const Sample& sample : samples) bags.push_back(sample.bags());
    std::vector<float> logits(static_cast<std::size_t>(num_samples));
    bench::RowLabel label;
    label.name = "serving/library/predict/s" + std::to_string(num_samples);
    bench::print_row(label, time_of(seconds, [&](std::size_t i) {
                       lease.predict({num_samples, samples[i].dense, bags[i]}, logits);
                     }));
    label.name = "serving/library/lookup/s" + std::to_string(num_samples);
    std::vector<double> lookups;
    time_of(seconds / 2, [&](std::size_t i) {
      lease.predict({num_samples, samples[i].dense, bags[i]}, logits);
      lookups.push_back(1e-3 * static_cast<double>(lease.figures().lookup.count()));
    });
    std::sort(lookups.begin(), lookups.end());
    bench::print_row(label, lookups);
    if (num_samples != 64) continue;
    const serving::InferParser parser(info, serving::ServerLimits{});
    std::vector<std::string> bodies;
    for (const Sample& sample : samples) bodies.push_back(body_of(info, sample));
    label.name = "serving/library/parse_json/s64";
    label.bytes = bodies[0].size();
    bench::print_row(
        label, time_of(seconds / 2, [&](std::size_t i) { parser.parse(bodies[i], std::nullopt); }));
  }
  return 0;
}
