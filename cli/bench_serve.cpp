#include "bench_serve.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <system_error>

#include <nlohmann/json.hpp>

#include "flags.h"
#include "serving/load_generator.h"
#include "tessera/checkpoint/error.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/serving/package.h"
#include "usage.h"

namespace tessera::cli {
namespace {

using serving::LoadOptions;
using serving::LoadReport;

constexpr std::string_view kHelp = R"(tessera bench serve [PKG] [flags]

  tessera serve pkg & tessera bench serve pkg --rate 2000      2000 requests a second, 10 seconds
  tessera bench serve pkg --samples 64 --json                  as many as the server can
  tessera bench serve pkg --times-peak 2 --seconds 60          twice what it can
  tessera bench serve --floor                                  HTTP alone: no model, 512-byte bodies

Asks a server that answers with the same package, at random times (a Poisson process) that do not
depend on its answers; a request's time counts from when it was due. On one machine give server and
load a core each: taskset -c 0 tessera serve ..., taskset -c 1 tessera bench serve ...

  --host H --port N    of the server (127.0.0.1, 8000)
  --rate R             requests a second (0: every connection asks again at once)
  --times-peak X       find the peak first, then offer X times as much
  --seconds S          that are counted, after one that is not (10)
  --connections N      that are kept open (64)
  --samples N          in a request (1)
  --ids N              of each feature of a sample (20)
  --format F           binary or json (binary)
  --timeout MS         Request-Timeout-Ms of each request (none)
  --token-file FILE    the server's
  --floor              GET /v2/health/live with 512 bytes
  --seed N             of ids and times (1)
  --json               one JSON object

Exit codes: 0 good, 2 wrong usage, 65 the package cannot be used, 69 nobody answers there, 75 some
requests were not answered at all. More: docs/serving.md
)";

struct Words {
  LoadOptions load;
  double times_peak = 0;
  std::int64_t num_samples = 1;
  std::int64_t num_ids = 20;
  std::string format = "binary";
  std::int64_t timeout = -1;
  std::string token_file;
  bool is_floor = false;
  bool as_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, Words& words) {
  app.set_help_flag();
  app.add_option("--host", words.load.host);
  app.add_option("--port", words.load.port)->check(CLI::Range(1, 65535));
  app.add_option("--rate", words.load.rate)->check(CLI::NonNegativeNumber);
  app.add_option("--times-peak", words.times_peak)->check(CLI::NonNegativeNumber);
  app.add_option("--seconds", words.load.seconds)->check(CLI::Range(0.1, 36000.0));
  app.add_option("--connections", words.load.connections)->check(CLI::Range(1, 10000));
  app.add_option("--samples", words.num_samples)->check(CLI::Range(0, 65536));
  app.add_option("--ids", words.num_ids)->check(CLI::Range(0, 100000));
  app.add_option("--format", words.format)->check(CLI::IsMember({"binary", "json"}));
  app.add_option("--timeout", words.timeout)->check(CLI::Range(0, 3'600'000));
  app.add_option("--token-file", words.token_file);
  app.add_flag("--floor", words.is_floor);
  app.add_option("--seed", words.load.seed);
  app.add_flag("--json", words.as_json);
  app.add_flag("--help,-h", words.wants_help);
}

std::string http_request(const Words& words, const std::string& method, const std::string& path,
                         const std::string& more, const std::string& body) {
  std::string token;
  if (!words.token_file.empty()) {
    std::FILE* file = std::fopen(words.token_file.c_str(), "r");
    char line[4096] = "";
    if (file != nullptr) {
      if (std::fgets(line, sizeof(line), file) == nullptr) line[0] = '\0';
      std::fclose(file);
    }
    line[std::strcspn(line, "\r\n")] = '\0';
    token = std::string("Authorization: Bearer ") + line + "\r\n";
  }
  return method + " " + path + " HTTP/1.1\r\nHost: " + words.load.host + "\r\n" + token + more +
         "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

// Requests for random samples of a model.
std::string model_request(const Words& words, const serving::ModelInfo& model,
                          const std::vector<std::vector<std::int64_t>>& known_ids,
                          std::mt19937_64& random) {
  using Json = nlohmann::ordered_json;
  const bool is_binary = words.format == "binary";
  Json inputs = Json::array();
  std::string tail;
  const auto add = [&](const std::string& name, const char* type, std::vector<std::int64_t> shape,
                       const auto& numbers) {
    Json input = {{"name", name}, {"shape", std::move(shape)}, {"datatype", type}};
    if (is_binary) {
      const std::size_t count = numbers.size() * sizeof(numbers[0]);
      input["parameters"] = {{"binary_data_size", count}};
      tail.append(reinterpret_cast<const char*>(numbers.data()), count);
    } else {
      input["data"] = numbers;
    }
    inputs.push_back(std::move(input));
  };
  std::normal_distribution<float> normal;
  std::vector<float> dense(static_cast<std::size_t>(words.num_samples * model.num_dense));
  for (float& x : dense) x = normal(random);
  add("dense", "FP32", {words.num_samples, model.num_dense}, dense);
  for (const serving::FeatureInfo& feature : model.features) {
    const serving::TableInfo& table = model.tables[feature.table];
    std::uniform_int_distribution<std::int64_t> row(0,
                                                    std::max<std::int64_t>(table.num_rows, 1) - 1);
    const std::vector<std::int64_t>* known = table.is_growing ? &known_ids[feature.table] : nullptr;
    std::vector<std::int64_t> ids(static_cast<std::size_t>(words.num_samples * words.num_ids));
    for (std::int64_t& one : ids) {
      one = row(random);
      if (known != nullptr && !known->empty()) one = (*known)[static_cast<std::size_t>(one)];
    }
    add(feature.name + ".values", "INT64", {static_cast<std::int64_t>(ids.size())}, ids);
    const std::vector<std::int32_t> lengths(static_cast<std::size_t>(words.num_samples),
                                            static_cast<std::int32_t>(words.num_ids));
    add(feature.name + ".lengths", "INT32", {words.num_samples}, lengths);
  }
  Json text = {{"inputs", inputs}};
  std::string more;
  if (is_binary) text["parameters"] = {{"binary_data_output", true}};
  const std::string head = text.dump();
  if (is_binary) more = "Inference-Header-Content-Length: " + std::to_string(head.size()) + "\r\n";
  if (words.timeout >= 0) {
    more += "Request-Timeout-Ms: " + std::to_string(words.timeout) + "\r\n";
  }
  return http_request(words, "POST", "/v2/models/" + model.name + "/infer", more, head + tail);
}

nlohmann::ordered_json json_of(LoadReport& report, const Words& words) {
  nlohmann::ordered_json codes = nlohmann::ordered_json::object();
  for (const auto& [code, count] : report.codes) codes[std::to_string(code)] = count;
  const auto quantiles = [](std::vector<float>& times) {
    nlohmann::ordered_json all = nlohmann::ordered_json::object();
    for (const auto& [name, share] :
         {std::pair("p50", 0.5), {"p90", 0.9}, {"p99", 0.99}, {"p999", 0.999}, {"max", 1.0}}) {
      all[name] = 1e3 * LoadReport::quantile(times, share);
    }
    return all;
  };
  return {{"offered_per_second", static_cast<double>(report.num_due) / words.load.seconds},
          {"good_per_second", report.rate_of(200)},
          {"samples_per_second", report.rate_of(200) * static_cast<double>(words.num_samples)},
          {"seconds", report.seconds},
          {"due", report.num_due},
          {"unanswered", report.num_unanswered},
          {"codes", codes},
          {"milliseconds", quantiles(report.times)},
          {"good_milliseconds", quantiles(report.good_times)}};
}

}  // namespace

int bench_serve(const std::vector<std::string>& words) {
  CLI::App app("", "bench serve");
  Words given;
  define_flags(app, given);
  const auto [names, flags] = names_and_flags(app, words);
  read_flags(app, flags);
  if (given.wants_help) return print_help(kHelp);
  if (given.is_floor ? !names.empty() : names.size() != 1) {
    throw UsageError(
        "bench: name the package that the server has, as in tessera bench serve pkg, or --floor");
  }
  if (given.times_peak > 0 && given.load.rate > 0) {
    throw UsageError("bench: --rate and --times-peak both say how much is asked");
  }
  try {
    if (given.is_floor) {
      given.num_samples = 0;
      given.load.requests = {
          http_request(given, "GET", "/v2/health/live", "", std::string(512, 'x'))};
    } else {
      const serving::Package package(names[0]);
      std::mt19937_64 random(given.load.seed);
      std::vector<std::vector<std::int64_t>> known_ids;
      for (std::size_t t = 0; t < package.model().tables.size(); ++t) {
        const bool is_growing = package.model().tables[t].is_growing;
        known_ids.push_back(is_growing ? package.ids(t) : std::vector<std::int64_t>());
      }
      for (int i = 0; i < 64; ++i) {
        given.load.requests.push_back(model_request(given, package.model(), known_ids, random));
      }
    }
    double peak = 0;
    if (given.times_peak > 0) {
      LoadOptions first = given.load;
      first.seconds = std::max(1.0, given.load.seconds / 4);
      peak = serving::generate_load(first).rate_of(200);
      given.load.rate = given.times_peak * peak;
      if (peak <= 0) {
        throw launch::LaunchError(launch::kExitData, "bench: no request was answered with 200",
                                  "the server has other features, or another token",
                                  "serve the package that is named here");
      }
    }
    LoadReport report = serving::generate_load(given.load);
    nlohmann::ordered_json answer = json_of(report, given);
    if (peak > 0) answer["peak_per_second"] = peak;
    if (given.as_json) {
      std::printf("%s\n", answer.dump().c_str());
    } else {
      if (peak > 0) std::printf("peak     %.0f requests a second\n", peak);
      std::printf("offered  %.0f a second for %.1f s over %d connections\n",
                  answer["offered_per_second"].get<double>(), given.load.seconds,
                  given.load.connections);
      std::printf("good     %.0f a second, %.0f samples a second\n",
                  answer["good_per_second"].get<double>(),
                  answer["samples_per_second"].get<double>());
      std::printf("answers  ");
      for (const auto& [code, count] : report.codes) {
        std::printf("%d: %llu  ", code, static_cast<unsigned long long>(count));
      }
      std::printf("unanswered: %llu\n", static_cast<unsigned long long>(report.num_unanswered));
      const auto& times = answer["good_milliseconds"];
      std::printf("time     p50 %.3f ms, p90 %.3f, p99 %.3f, p99.9 %.3f, max %.3f, from when due\n",
                  times["p50"].get<double>(), times["p90"].get<double>(),
                  times["p99"].get<double>(), times["p999"].get<double>(),
                  times["max"].get<double>());
    }
    return report.num_unanswered == 0 ? launch::kExitOk : launch::kExitLostPeer;
  } catch (const checkpoint::Error& error) {
    throw launch::LaunchError(launch::kExitData, "bench: " + names[0], error.what(),
                              "make a package with tessera export RUN --out PKG");
  } catch (const std::system_error& error) {
    throw launch::LaunchError(launch::kExitRendezvous, "bench: nobody answers", error.what(),
                              "start a server first: tessera serve PKG");
  }
}

std::vector<std::string> bench_serve_flags() {
  CLI::App app("", "bench serve");
  Words words;
  define_flags(app, words);
  return long_flags(app);
}

}  // namespace tessera::cli
