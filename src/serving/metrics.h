// src/serving/metrics.h — counts and times of a server, as Prometheus reads them.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace tessera::serving {

/// Times in buckets from 0.1 ms to 10 s.
class Histogram {
 public:
  static constexpr std::array kBounds = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
                                         0.05,   0.1,    0.2,    0.5,   1.0,   2.0,   5.0,  10.0};
  void add(std::chrono::steady_clock::duration time);
  void write(std::string& text, const std::string& stage) const;

 private:
  std::array<std::atomic<std::uint64_t>, kBounds.size() + 1> counts_{};
  std::atomic<std::uint64_t> nanoseconds_{0};
};

struct Metrics {
  void answered(int code);
  void refused(const std::string& reason);
  std::uint64_t num_answered() const;

  std::atomic<std::uint64_t> received{0};   // requests whose headers were read
  std::atomic<std::uint64_t> cancelled{0};  // whose client was gone when the answer was there
  std::atomic<std::uint64_t> samples{0};
  std::atomic<std::uint64_t> ids{0};
  std::atomic<std::uint64_t> batches{0};
  std::atomic<std::int64_t> queued_samples{0};
  std::atomic<std::int64_t> connections{0};
  std::atomic<std::uint64_t> reloads{0};
  std::atomic<std::uint64_t> reloads_refused{0};
  Histogram queue;
  Histogram compute;
  Histogram total;

  std::string text(std::int64_t version, std::int64_t mapped_bytes, bool is_ready) const;

 private:
  mutable std::mutex mutex_;
  std::map<int, std::uint64_t> codes_;
  std::map<std::string, std::uint64_t> reasons_;
};

}  // namespace tessera::serving
