// src/serving/batcher.h — requests that wait share the next computation.
//
// A worker that is free takes what waits, up to max_batch samples; with a batch_wait it gives the
// first that long to be joined. What a sample gets does not depend on its company.

#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "serving/infer_request.h"
#include "serving/metrics.h"
#include "tessera/serving/model.h"
#include "tessera/serving/server.h"

namespace tessera::serving {

using Clock = std::chrono::steady_clock;

/// What came of a request: logits, or an error.
struct Outcome {
  int code = 200;
  std::string error;
  std::string where;
  std::vector<float> logits;
  std::int64_t step = 0;  // of the version that computed them
};

class Batcher;

/// Room in the queue that is kept for a request whose body is being read, until this ends.
class Room {
 public:
  Room(Batcher& batcher, std::uint64_t number) : batcher_(batcher), number_(number) {}
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;
  ~Room();
  std::uint64_t number() const noexcept { return number_; }

 private:
  Batcher& batcher_;
  std::uint64_t number_;
};

struct Job {
  InferRequest request;
  std::optional<std::int64_t> step;  // the version that was asked for; none: the current one
  Clock::time_point arrived;
  Clock::time_point deadline;
  std::uint64_t num_bytes = 0;
  std::shared_ptr<Room> room;                       // that was kept for it, if any
  std::function<void(InferRequest, Outcome)> done;  // called once, by a worker
};

class Batcher {
 public:
  Batcher(Model& model, const ServerOptions& options, Metrics& metrics, ProcessGauges& gauges);
  Batcher(const Batcher&) = delete;
  Batcher& operator=(const Batcher&) = delete;
  ~Batcher() { stop(); }

  /// Throws HttpError 429 if the queue has no room for a request, or takes longer than the deadline
  /// allows; how many samples it has is guessed from its bytes. Those for whom room is kept count
  /// as if they waited already, unless it is kept for this one too: then they come behind it.
  void check_room(std::uint64_t num_bytes, Clock::time_point deadline, bool has_room = false);
  /// The same before a body is read, so that refusing costs little, and keeps the room: otherwise
  /// all whose headers come while the queue is short would have their bodies read, and most be
  /// refused after that. Who takes longer to send than the latency budget keeps nothing.
  std::shared_ptr<Room> keep_room(std::uint64_t num_bytes, Clock::time_point deadline);
  void give_back(const Room& room) noexcept;
  /// Takes a request, or throws HttpError 429: the queue is full, or its deadline cannot be met.
  void add(Job job);
  /// Computes what waits, then ends the workers.
  void stop();

 private:
  void work();
  std::vector<Job> take();
  // Until when those in the queue may wait to be joined.
  Clock::time_point latest_start() const;
  struct Kept {
    Clock::time_point until;
    std::int64_t num_samples;
    std::uint64_t num_bytes;
  };
  // With the mutex held:
  // Throws as check_room.
  void refuse_unless_in_time(std::int64_t num_samples, std::uint64_t num_bytes,
                             Clock::time_point deadline, bool has_room);
  std::int64_t samples_in(std::uint64_t num_bytes) const;  // a guess
  void forget_late_rooms();
  void forget(std::map<std::uint64_t, Kept>::iterator room);
  void compute(std::vector<Job>& jobs);
  void compute_alone(Job& job);
  /// The version a job asks for. Throws HttpError 404 if it is gone.
  Model::Lease lease_for(const Job& job);
  void finish(Job& job, Outcome outcome);
  void count(const PredictFigures& figures, std::int64_t num_samples);

  Model& model_;
  const ServerOptions& options_;
  Metrics& metrics_;
  ProcessGauges& gauges_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  std::int64_t queued_samples_ = 0;
  std::int64_t computed_samples_ = 0;  // that are being computed now
  std::uint64_t queued_bytes_ = 0;
  std::map<std::uint64_t, Kept> rooms_;  // by number, which is the order in which they end
  std::uint64_t last_room_ = 0;
  std::int64_t kept_samples_ = 0;
  std::uint64_t kept_bytes_ = 0;
  double seconds_per_sample_ = 0;  // a moving mean
  double bytes_per_sample_ = 0;    // the same, of requests that were taken
  bool is_stopping_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace tessera::serving
