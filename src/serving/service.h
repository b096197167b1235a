// src/serving/service.h — what a server answers, without knowing how the bytes travel.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "serving/batcher.h"
#include "serving/infer_request.h"
#include "serving/metrics.h"
#include "tessera/serving/model.h"
#include "tessera/serving/server.h"

namespace tessera::serving {

struct HttpRequest {
  std::string method;
  std::string target;
  bool is_admin = false;  // came in by the admin port
  std::string authorization;
  std::string content_encoding;
  std::string json_bytes;  // Inference-Header-Content-Length
  std::string timeout;     // Request-Timeout-Ms
  std::string body;
};

struct HttpAnswer {
  int code = 200;
  std::string type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
};

class Service {
 public:
  using Log = std::function<void(const std::string&)>;
  Service(Model& model, const ServerOptions& options, Log log);

  /// Calls `done` once, here or later from another thread. `drain` is called for a request that
  /// asks for it.
  void handle(HttpRequest request, std::function<void(HttpAnswer)> done);

  /// An answer to what could not even be read.
  HttpAnswer failure(int code, const std::string& what, const std::string& where = {});

  void start_draining() noexcept { is_draining_ = true; }
  bool is_draining() const noexcept { return is_draining_; }
  /// Ends the workers after what waits is done.
  void stop() { batcher_.stop(); }
  bool reload();
  Metrics& metrics() noexcept { return metrics_; }
  void on_drain(std::function<void()> drain) { drain_ = std::move(drain); }

 private:
  HttpAnswer answer(const HttpRequest& request);
  void check_token(const HttpRequest& request) const;
  void infer(HttpRequest request, std::function<void(HttpAnswer)> done);
  std::shared_ptr<const ModelInfo> info() const;
  HttpAnswer from(const InferRequest& request, Outcome outcome);
  HttpAnswer counted(HttpAnswer answer, Clock::time_point arrived);

  Model& model_;
  const ServerOptions& options_;
  Log log_;
  Metrics metrics_;
  InferParser parser_;
  std::atomic<bool> is_draining_{false};
  std::atomic<std::uint64_t> num_incidents_{0};
  std::function<void()> drain_;
  Batcher batcher_;  // last: it ends first
};

}  // namespace tessera::serving
