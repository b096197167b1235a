#include "serving/metrics.h"

#include <cstdio>

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

void Histogram::write(std::string& text, const std::string& stage) const {
  const std::string name = "tessera_latency_seconds";
  const std::string label = "stage=\"" + stage + "\"";
  std::uint64_t sum = 0;
  char number[64];
  for (std::size_t i = 0; i < kBounds.size(); ++i) {
    sum += counts_[i].load(std::memory_order_relaxed);
    std::snprintf(number, sizeof(number), "%g", kBounds[i]);
    text += name + "_bucket{" + label + ",le=\"" + number + "\"} " + std::to_string(sum) + "\n";
  }
  sum += counts_.back().load(std::memory_order_relaxed);
  text += name + "_bucket{" + label + ",le=\"+Inf\"} " + std::to_string(sum) + "\n";
  std::snprintf(number, sizeof(number), "%.9g",
                1e-9 * static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)));
  text += name + "_sum{" + label + "} " + number + "\n";
  text += name + "_count{" + label + "} " + std::to_string(sum) + "\n";
}

void Metrics::answered(int code) {
  const std::lock_guard lock(mutex_);
  ++codes_[code];
}

void Metrics::refused(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++reasons_[reason];
}

std::uint64_t Metrics::num_answered() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const auto& [code, count] : codes_) sum += count;
  return sum;
}

std::string Metrics::text(std::int64_t version, std::int64_t mapped_bytes, bool is_ready) const {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    head(text, "tessera_requests_total", "counter", "Requests answered, by code.");
    for (const auto& [code, count] : codes_) {
      text += "tessera_requests_total{code=\"" + std::to_string(code) + "\"} " +
              std::to_string(count) + "\n";
    }
    head(text, "tessera_refused_total", "counter", "Requests refused, by reason.");
    for (const auto& [reason, count] : reasons_) {
      text += "tessera_refused_total{reason=\"" + reason + "\"} " + std::to_string(count) + "\n";
    }
  }
  const auto number = [](const auto& value) { return static_cast<double>(value.load()); };
  line(text, "tessera_received_total", "counter", "Requests received.", number(received));
  line(text, "tessera_cancelled_total", "counter", "Answers whose client was gone.",
       number(cancelled));
  line(text, "tessera_samples_total", "counter", "Samples scored.", number(samples));
  line(text, "tessera_ids_total", "counter", "Ids looked up.", number(ids));
  line(text, "tessera_batches_total", "counter", "Batches computed.", number(batches));
  line(text, "tessera_queued_samples", "gauge", "Samples that wait.", number(queued_samples));
  line(text, "tessera_connections", "gauge", "Open connections.", number(connections));
  line(text, "tessera_reloads_total", "counter", "Packages opened again.", number(reloads));
  line(text, "tessera_reloads_refused_total", "counter", "Packages that were refused.",
       number(reloads_refused));
  line(text, "tessera_model_version", "gauge", "Step of the model that answers.",
       static_cast<double>(version));
  line(text, "tessera_mapped_bytes", "gauge", "Bytes of tables in the address space.",
       static_cast<double>(mapped_bytes));
  line(text, "tessera_ready", "gauge", "1 while requests are taken.", is_ready ? 1 : 0);
  head(text, "tessera_latency_seconds", "histogram", "Time of requests, by stage.");
  queue.write(text, "queue");
  compute.write(text, "compute");
  total.write(text, "total");
  return text;
}

}  // namespace tessera::serving
