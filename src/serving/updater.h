// src/serving/updater.h — follows a folder into which a training publishes.
//
// A thread looks when the folder changes, and a few times a second. What is newer than the version
// that is served becomes the next one; what is damaged or refused is said once, and the old version
// goes on. After a step back nothing is taken until somebody says so.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "serving/metrics.h"
#include "tessera/serving/model.h"

namespace tessera::serving {

/// Why a canary has refused a version.
class CanaryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Updater {
 public:
  using Log = std::function<void(const std::string&)>;
  Updater(Model& model, UpdateFigures& figures, std::string folder, Model::Canary canary, Log log);
  Updater(const Updater&) = delete;
  Updater& operator=(const Updater&) = delete;
  ~Updater();

  /// Starts the thread.
  void start();
  /// Looks once; true if there is a new version now.
  bool look();

 private:
  void run();
  void refuse(const std::string& sum, const std::string& why);

  Model& model_;
  UpdateFigures& figures_;
  std::string folder_;
  Model::Canary canary_;
  Log log_;
  std::set<std::string> refused_;  // sums of manifests, and warnings that were said
  // The folder, and its commit up to which there is nothing to do. Another folder of the same name
  // counts its commits anew.
  std::pair<std::uint64_t, std::int64_t> seen_{0, -1};
  int wake_[2] = {-1, -1};  // a pipe that ends the thread
  std::thread thread_;
};

/// Refuses a version whose probabilities for `requests` (JSON bodies of /infer, one per line, or a
/// JSON list) are not finite, or differ from those of the version before by more than `bound`.
/// Throws std::runtime_error for a file that holds something else.
Model::Canary canary_of(const std::string& file, double bound, const ModelInfo& model);

}  // namespace tessera::serving
