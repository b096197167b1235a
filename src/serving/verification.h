// src/serving/verification.h — compares the rows of a package with their sums while it is served.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "serving/metrics.h"
#include "tessera/serving/model.h"

namespace tessera::serving {

/// A thread that lets all others go first. Rows that are not what was exported are no answer: the
/// first chunk that differs is told, and nothing is answered with the package from then on.
class Verification {
 public:
  Verification(Model& model, Metrics& metrics, std::function<void(const std::string&)> log)
      : model_(model), metrics_(metrics), log_(std::move(log)) {}
  Verification(const Verification&) = delete;
  Verification& operator=(const Verification&) = delete;
  ~Verification() { stop(); }

  /// Begins with the package that is open, the n-th; also anew when there is another one.
  void start(std::int64_t number);
  void stop();

 private:
  void run(std::int64_t number);
  void end();

  Model& model_;
  Metrics& metrics_;
  std::function<void(const std::string&)> log_;
  std::mutex mutex_;  // of the thread
  std::atomic<bool> is_stopping_{false};
  std::thread thread_;
};

}  // namespace tessera::serving
