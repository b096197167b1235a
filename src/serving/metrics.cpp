#include "serving/metrics.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

namespace tessera::serving {
namespace {

void head(std::string& text, const char* name, const char* kind, const char* help) {
  text += std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + kind + "\n";
}

void line(std::string& text, const char* name, const char* kind, const char* help, double value) {
  head(text, name, kind, help);
  char number[64];
  std::snprintf(number, sizeof(number), " %.17g\n", value);
  text += std::string(name) + number;
}

}  // namespace

void Histogram::add(std::chrono::steady_clock::duration time) {
  const double seconds = std::chrono::duration<double>(time).count();
  std::size_t place = 0;
  while (place < kBounds.size() && seconds > kBounds[place]) ++place;
  counts_[place].fetch_add(1, std::memory_order_relaxed);
  nanoseconds_.fetch_add(static_cast<std::uint64_t>(
                             std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()),
                         std::memory_order_relaxed);
}

std::array<std::uint64_t, Histogram::kBounds.size() + 1> Histogram::counts() const {
  std::array<std::uint64_t, kBounds.size() + 1> counts{};
  for (std::size_t i = 0; i < counts.size(); ++i) {
    counts[i] = counts_[i].load(std::memory_order_relaxed);
  }
  return counts;
}

double Histogram::seconds() const {
  return 1e-9 * static_cast<double>(nanoseconds_.load(std::memory_order_relaxed));
}

double Histogram::quantile(double share) const {
  const auto all = counts();
  std::uint64_t sum = 0;
  for (const std::uint64_t count : all) sum += count;
  const auto wanted = static_cast<std::uint64_t>(std::ceil(share * static_cast<double>(sum)));
  if (sum == 0) return 0;
  std::uint64_t below = 0;
  for (std::size_t i = 0; i < kBounds.size(); ++i) {
    below += all[i];
    if (below >= wanted) return kBounds[i];
  }
  return kBounds.back();
}

void Histogram::write(std::string& text, const std::string& stage) const {
  const std::string name = "tessera_latency_seconds";
  const std::string label = "stage=\"" + stage + "\"";
  const auto all = counts();
  std::uint64_t sum = 0;
  char number[64];
  for (std::size_t i = 0; i < kBounds.size(); ++i) {
    sum += all[i];
    std::snprintf(number, sizeof(number), "%g", kBounds[i]);
    text += name + "_bucket{" + label + ",le=\"" + number + "\"} " + std::to_string(sum) + "\n";
  }
  sum += all.back();
  text += name + "_bucket{" + label + ",le=\"+Inf\"} " + std::to_string(sum) + "\n";
  std::snprintf(number, sizeof(number), "%.9g", seconds());
  text += name + "_sum{" + label + "} " + number + "\n";
  text += name + "_count{" + label + "} " + std::to_string(sum) + "\n";
}

void SizeHistogram::add(std::int64_t size) {
  std::size_t place = 0;
  while (place < kBuckets && size > std::int64_t{1} << place) ++place;
  counts_[place].fetch_add(1, std::memory_order_relaxed);
  sum_.fetch_add(static_cast<std::uint64_t>(size), std::memory_order_relaxed);
}

void SizeHistogram::write(std::string& text, const std::string& name) const {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i <= kBuckets; ++i) {
    sum += counts_[i].load(std::memory_order_relaxed);
    const std::string bound = i < kBuckets ? std::to_string(std::int64_t{1} << i) : "+Inf";
    text += name + "_bucket{le=\"" + bound + "\"} " + std::to_string(sum) + "\n";
  }
  text += name + "_sum " + std::to_string(sum_.load(std::memory_order_relaxed)) + "\n";
  text += name + "_count " + std::to_string(sum) + "\n";
}

void UpdateFigures::set_error(const std::string& text) {
  turn_.fetch_add(1);
  const std::size_t count = std::min(text.size(), text_.size() - 1);
  for (std::size_t i = 0; i < count; ++i) text_[i].store(text[i]);
  text_[count].store('\0');
  turn_.fetch_add(1);
}

std::string UpdateFigures::error() const {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint32_t before = turn_.load();
    std::string text;
    for (const auto& c : text_) {
      if (c.load() == '\0') break;
      text += c.load();
    }
    if (before % 2 == 0 && turn_.load() == before) return text;
  }
  return "";
}

void Metrics::answered(int code) {
  const auto found = std::find(kCodes.begin(), kCodes.end(), code);
  ++codes[static_cast<std::size_t>(
      std::min<std::ptrdiff_t>(found - kCodes.begin(), kCodes.size() - 1))];
}

void Metrics::refused(Refusal reason) { ++refusals[static_cast<std::size_t>(reason)]; }

std::uint64_t Metrics::num_answered() const {
  std::uint64_t sum = 0;
  for (const auto& count : codes) sum += count.load();
  return sum;
}

std::uint64_t Metrics::num_lost() const {
  return restarts.load() > 0 ? 0 : received.load() - num_answered();
}

std::int64_t Metrics::queued_samples() const {
  std::int64_t sum = 0;
  for (const ProcessGauges& process : processes) sum += process.queued_samples.load();
  return sum;
}

std::int64_t Metrics::connections() const {
  std::int64_t sum = 0;
  for (const ProcessGauges& process : processes) sum += process.connections.load();
  return sum;
}

std::string Metrics::text(const Model& model) const {
  std::string text;
  head(text, "tessera_requests_total", "counter", "Requests answered, by code.");
  for (std::size_t i = 0; i < kCodes.size(); ++i) {
    if (codes[i].load() == 0) continue;
    const std::string code = kCodes[i] == 0 ? "other" : std::to_string(kCodes[i]);
    text +=
        "tessera_requests_total{code=\"" + code + "\"} " + std::to_string(codes[i].load()) + "\n";
  }
  head(text, "tessera_refused_total", "counter", "Requests refused, by reason.");
  for (std::size_t i = 0; i < kRefusals.size(); ++i) {
    text += std::string("tessera_refused_total{reason=\"") + kRefusals[i] + "\"} " +
            std::to_string(refusals[i].load()) + "\n";
  }
  const auto number = [](const auto& value) { return static_cast<double>(value.load()); };
  line(text, "tessera_received_total", "counter", "Requests received.", number(received));
  line(text, "tessera_cancelled_total", "counter", "Answers whose client was gone.",
       number(cancelled));
  line(text, "tessera_samples_total", "counter", "Samples scored.", number(samples));
  line(text, "tessera_ids_total", "counter", "Ids looked up.", number(ids));
  line(text, "tessera_unknown_ids_total", "counter", "Ids without a row, in tables that grow.",
       number(unknown_ids));
  line(text, "tessera_batches_total", "counter", "Batches computed.", number(batches));
  line(text, "tessera_queued_samples", "gauge", "Samples that wait.",
       static_cast<double>(queued_samples()));
  line(text, "tessera_connections", "gauge", "Open connections.",
       static_cast<double>(connections()));
  line(text, "tessera_reloads_total", "counter", "Packages opened again.", number(reloads));
  line(text, "tessera_reloads_refused_total", "counter", "Packages that were refused.",
       number(reloads_refused));
  line(text, "tessera_restarts_total", "counter", "Processes that died and were started again.",
       number(restarts));
  line(text, "tessera_package_verified", "gauge", "1 when all sums of the package are right.",
       model.is_verified ? 1 : 0);
  line(text, "tessera_package_damaged", "gauge", "1 if one is wrong: nothing is answered.",
       model.is_damaged ? 1 : 0);
  line(text, "tessera_updates_total", "counter", "Published versions taken over.",
       number(updates.applied));
  line(text, "tessera_delta_refused_total", "counter", "Published versions that were refused.",
       number(updates.refused));
  line(text, "tessera_updates_whole_total", "counter", "Taken over without deltas, all rows.",
       number(updates.whole));
  line(text, "tessera_rows_updated_total", "counter", "Rows that updates have changed.",
       number(updates.rows));
  line(text, "tessera_delta_lag_seconds", "gauge", "From the last commit to its first answer.",
       1e-6 * number(updates.last_lag_us));
  line(text, "tessera_updates_held", "gauge", "1 after a step back, until told to go on.",
       number(updates.is_held));
  line(text, "tessera_model_version", "gauge", "Step of the model that answers.",
       static_cast<double>(model.version));
  line(text, "tessera_model_age_seconds", "gauge", "Since that version was made.",
       static_cast<double>(model.age));
  line(text, "tessera_mapped_bytes", "gauge", "Bytes of tables in the address space.",
       static_cast<double>(model.mapped_bytes));
  line(text, "tessera_ready", "gauge", "1 while requests are taken.", model.is_ready ? 1 : 0);
  head(text, "tessera_latency_seconds", "histogram", "Time of requests, by stage.");
  queue.write(text, "queue");
  lookup.write(text, "lookup");
  dense.write(text, "dense");
  compute.write(text, "compute");
  total.write(text, "total");
  head(text, "tessera_batch_samples", "histogram", "Samples of the batches that were computed.");
  batch_samples.write(text, "tessera_batch_samples");
  return text;
}

std::string Metrics::json(const Model& model) const {
  nlohmann::ordered_json by_code = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < kCodes.size(); ++i) {
    if (codes[i].load() > 0) by_code[std::to_string(kCodes[i])] = codes[i].load();
  }
  nlohmann::ordered_json by_reason = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < kRefusals.size(); ++i) by_reason[kRefusals[i]] = refusals[i].load();
  const nlohmann::ordered_json figures = {{"received", received.load()},
                                          {"answered", num_answered()},
                                          {"codes", by_code},
                                          {"refused", by_reason},
                                          {"samples", samples.load()},
                                          {"ids", ids.load()},
                                          {"unknown_ids", unknown_ids.load()},
                                          {"batches", batches.load()},
                                          {"queued_samples", queued_samples()},
                                          {"connections", connections()},
                                          {"restarts", restarts.load()},
                                          {"version", model.version},
                                          {"age_seconds", model.age},
                                          {"mapped_bytes", model.mapped_bytes},
                                          {"ready", model.is_ready},
                                          {"bounds", Histogram::kBounds},
                                          {"latency", total.counts()},
                                          {"latency_seconds", total.seconds()},
                                          {"updates",
                                           {{"watching", updates.is_watching.load()},
                                            {"applied", updates.applied.load()},
                                            {"refused", updates.refused.load()},
                                            {"whole", updates.whole.load()},
                                            {"rows", updates.rows.load()},
                                            {"lag_seconds", 1e-6 * updates.last_lag_us.load()},
                                            {"held", updates.is_held.load()},
                                            {"error", updates.error()}}}};
  return figures.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace tessera::serving
