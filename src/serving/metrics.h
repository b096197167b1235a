// src/serving/metrics.h — counts and times of a server, as Prometheus and its page read them.
//
// Plain numbers without pointers: they lie in memory that all processes of a server share.

#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace tessera::serving {

/// Times in buckets from 0.1 ms to 10 s.
class Histogram {
 public:
  static constexpr std::array kBounds = {0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02,
                                         0.05,   0.1,    0.2,    0.5,   1.0,   2.0,   5.0,  10.0};
  void add(std::chrono::steady_clock::duration time);
  void write(std::string& text, const std::string& stage) const;
  /// How many were in each bucket, those above the last bound at the end.
  std::array<std::uint64_t, kBounds.size() + 1> counts() const;
  double seconds() const;  // the sum of all
  /// The bound below which that share of the times lies; 0 if there are none.
  double quantile(double share) const;

 private:
  std::array<std::atomic<std::uint64_t>, kBounds.size() + 1> counts_{};
  std::atomic<std::uint64_t> nanoseconds_{0};
};

/// Samples of batches, in buckets of powers of two.
class SizeHistogram {
 public:
  static constexpr std::size_t kBuckets = 13;  // up to 4096
  void add(std::int64_t size);
  void write(std::string& text, const std::string& name) const;

 private:
  std::array<std::atomic<std::uint64_t>, kBuckets + 1> counts_{};
  std::atomic<std::uint64_t> sum_{0};
};

/// Why a request was refused before it was computed.
enum class Refusal : std::uint8_t { kQueueFull, kDeadline, kLate, kConnections };
inline constexpr std::array<const char*, 4> kRefusals = {"queue full", "deadline", "late",
                                                         "connections"};
inline constexpr std::array kCodes = {200, 202, 400, 401, 403, 404, 405, 408, 409, 411,
                                      413, 415, 422, 429, 431, 500, 503, 504, 0};  // 0: another

/// What only one process knows of itself, and what it leaves behind when it dies.
struct ProcessGauges {
  std::atomic<std::int64_t> queued_samples{0};
  std::atomic<std::int64_t> connections{0};
  std::atomic<std::int32_t> process{0};
};
inline constexpr int kMaxProcesses = 64;

/// What became of published checkpoints.
struct UpdateFigures {
  std::atomic<std::uint64_t> applied{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> whole{0};  // of those applied: no deltas led there
  std::atomic<std::uint64_t> rows{0};
  std::atomic<std::uint64_t> last_lag_us{0};  // from the commit on the disk to the first lease
  std::atomic<bool> is_held{false};           // after a step back, until told to go on
  std::atomic<bool> is_watching{false};

  void set_error(const std::string& text);
  std::string error() const;  // why the last one was refused; empty if a later one was not

 private:
  std::atomic<std::uint32_t> turn_{0};  // odd while the text is being written
  std::array<std::atomic<char>, 512> text_{};
};

struct Metrics {
  void answered(int code);
  void refused(Refusal reason);
  std::uint64_t num_answered() const;
  /// Requests without an answer, when nobody works on any; those of processes that died do not
  /// count.
  std::uint64_t num_lost() const;
  std::int64_t queued_samples() const;
  std::int64_t connections() const;

  std::atomic<std::uint64_t> received{0};   // requests whose headers were read
  std::atomic<std::uint64_t> cancelled{0};  // whose client was gone when the answer was there
  std::atomic<std::uint64_t> samples{0};
  std::atomic<std::uint64_t> ids{0};
  std::atomic<std::uint64_t> unknown_ids{0};  // without a row, in tables that grow
  std::atomic<std::uint64_t> batches{0};
  std::atomic<std::uint64_t> reloads{0};
  std::atomic<std::uint64_t> reloads_refused{0};
  std::atomic<std::uint64_t> restarts{0};  // of processes that died
  // The last package, counted from 1, whose sums were all right, and the last with one that was
  // not.
  std::atomic<std::int64_t> verified_package{0};
  std::atomic<std::int64_t> damaged_package{0};
  std::array<ProcessGauges, kMaxProcesses> processes;
  UpdateFigures updates;
  Histogram queue;
  Histogram lookup;
  Histogram dense;
  Histogram compute;
  Histogram total;
  SizeHistogram batch_samples;
  std::array<std::atomic<std::uint64_t>, kCodes.size()> codes{};
  std::array<std::atomic<std::uint64_t>, kRefusals.size()> refusals{};

  struct Model {
    std::int64_t version = 0;
    std::int64_t age = 0;  // seconds
    std::int64_t mapped_bytes = 0;
    bool is_ready = false;
    bool is_verified = false;
    bool is_damaged = false;
  };
  /// Prometheus' text format, 0.0.4.
  std::string text(const Model& model) const;
  /// The same numbers for the page of a server, as JSON.
  std::string json(const Model& model) const;
};

}  // namespace tessera::serving
