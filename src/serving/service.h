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
#include "serving/errands.h"
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
  std::shared_ptr<Room> room;  // that was kept while the body came
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
  /// `gauges` are this process's among those of `metrics`.
  Service(Model& model, const ServerOptions& options, Metrics& metrics, ProcessGauges& gauges,
          Log log);

  /// Calls `done` once, here or later from another thread.
  void handle(HttpRequest request, std::function<void(HttpAnswer)> done);

  /// The answer to a request for predictions that would be refused for its token or for want of
  /// room or time whatever its body says; nothing otherwise, and `room` is kept for it, which
  /// belongs with the request when it is handled. `authorization` and `timeout` are its headers
  /// Authorization and Request-Timeout-Ms.
  std::optional<HttpAnswer> refusal(std::uint64_t num_bytes, const std::string& authorization,
                                    const std::string& timeout, std::shared_ptr<Room>& room);

  /// An answer to what could not even be read.
  HttpAnswer failure(int code, const std::string& what, const std::string& where = {});

  /// From now on requests are taken; until then they are told to come back.
  void be_ready() noexcept { is_ready_ = true; }
  void start_draining() noexcept { is_draining_ = true; }
  bool is_draining() const noexcept { return is_draining_; }
  /// Ends the workers after what waits is done.
  void stop() {
    reloads_.stop();
    batcher_.stop();
  }
  /// Opens the package again, in a thread of its own: reading one takes its time, and all others
  /// are answered meanwhile. Then calls `done` from there: is it served now?
  void reload(std::function<void(bool)> done);
  Metrics& metrics() noexcept { return metrics_; }
  ProcessGauges& gauges() noexcept { return gauges_; }
  /// What /admin/drain does, and, unless this process reloads by itself, /admin/reload.
  void on_drain(std::function<void()> drain) { drain_ = std::move(drain); }
  void on_reload(std::function<void()> reload) { reload_ = std::move(reload); }
  /// After this process has opened another package: the n-th.
  void on_opened(std::function<void(std::int64_t)> opened) { opened_ = std::move(opened); }
  /// Which package it is, counted from 1 over all processes.
  void set_package(std::int64_t number) { package_ = number; }

 private:
  HttpAnswer answer(const HttpRequest& request);
  bool open_package();
  /// The answer to /admin/reload, when the package is open.
  void answer_reload(const HttpRequest& request, std::function<void(HttpAnswer)> done);
  std::optional<HttpAnswer> answer_admin(const HttpRequest& request, const std::string& path);
  HttpAnswer answer_model(const HttpRequest& request, const std::string& path);
  void check_token(const std::string& authorization) const;
  Clock::time_point deadline_of(const std::string& timeout, Clock::time_point arrived) const;
  void infer(HttpRequest request, std::function<void(HttpAnswer)> done);
  /// The step in an address ".../versions/STEP"; throws HttpError 404 if there is none like it.
  std::int64_t version_in(const std::string& text) const;
  std::vector<std::int64_t> steps() const;
  std::string versions_text() const;
  Metrics::Model model_figures() const;
  /// A 500 with a number, whose cause is in the log alone.
  HttpAnswer incident(const std::string& what);
  HttpAnswer from(const InferRequest& request, Outcome outcome);
  HttpAnswer counted(HttpAnswer answer, Clock::time_point arrived);

  Model& model_;
  const ServerOptions& options_;
  Metrics& metrics_;
  ProcessGauges& gauges_;
  Log log_;
  ModelInfo info_;  // names and inputs, which no reload changes
  InferParser parser_;
  /// Throws HttpError 503 unless requests are taken.
  void check_ready() const;

  std::atomic<bool> is_ready_{false};
  std::atomic<bool> is_draining_{false};
  std::atomic<std::uint64_t> num_incidents_{0};
  std::function<void()> drain_;
  std::function<void()> reload_;
  std::function<void(std::int64_t)> opened_;
  std::atomic<std::int64_t> package_{1};
  Batcher batcher_;
  Errands reloads_;  // last: it ends first
};

}  // namespace tessera::serving
