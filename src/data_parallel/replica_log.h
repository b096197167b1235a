// src/data_parallel/replica_log.h — what is known about a replica, under torch's keys.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "tessera/comm/group.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"
#include "tessera/data_parallel/replica.h"

namespace tessera::data_parallel {

class BucketReducer;

/// Times are taken in the first 10 iterations and then in every `sample_rate`-th; what an iteration
/// shows is written down when the next one begins.
class ReplicaLog {
 public:
  using Event = c10d::Timer::Event;

  ReplicaLog(const ModelParts& parts, const std::vector<NamedParameter>& parameters,
             const comm::Group& group, const Options& options, bool syncs_buffers);

  /// Before a forward whose backward reduces.
  void begin_iteration(const BucketReducer& reducer);
  /// `event` happens now.
  void record(Event event);
  std::int64_t num_iterations() const noexcept { return num_iterations_; }
  void set_sample_rate(int sample_rate) noexcept { sample_rate_ = sample_rate; }

  void set(const std::string& key, std::string value) { data_.strings[key] = std::move(value); }
  void set(const std::string& key, std::int64_t value) { data_.integers[key] = value; }
  void set_error(const std::string& text);
  /// How the gradients are cut at first.
  void set_buckets(const std::vector<std::int64_t>& bytes);
  const LoggingData& data() const noexcept { return data_; }

 private:
  bool is_sampled() const noexcept;
  void sample(const BucketReducer& reducer);
  void sample_times();
  /// To whoever has asked LibTorch for such data.
  void publish() const;

  const std::vector<NamedParameter>& parameters_;
  LoggingData data_;
  std::unique_ptr<c10d::Timer> timer_;  // null for a module on several GPUs
  std::int64_t num_iterations_ = 0;
  std::int64_t num_sampled_ = 0;
  int sample_rate_ = 100;
};

}  // namespace tessera::data_parallel
