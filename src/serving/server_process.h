// src/serving/server_process.h — one process that answers: connections in, answers out.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "serving/listener.h"
#include "serving/metrics.h"
#include "tessera/serving/server.h"

namespace tessera::serving {

/// What a process is given by whoever started it.
struct ServerProcess {
  const Listener& data;
  const Listener* admin;     // null: none
  Metrics& metrics;          // of all processes
  int number = 0;            // which one this is
  std::int64_t package = 1;  // how often one was opened until this one
  bool verifies = true;      // one process compares the sums for all
  /// Sends a wish to reload or drain to the process that watches over this one; null: this process
  /// does it by itself, also for SIGHUP.
  std::function<void()> on_reload;
  std::function<void()> on_drain;
};

/// Answers until SIGTERM or SIGINT, as `serve` says.
int run_server_process(Model& model, const ServerOptions& options, const ServerProcess& process,
                       const std::function<void()>& on_ready,
                       const std::function<void(const std::string&)>& log);

/// Starts processes and watches over them, as `serve` says.
int supervise(Model& model, const ServerOptions& options, const Listener& data,
              const Listener* admin, Metrics& metrics, const std::function<void()>& on_ready,
              const std::function<void(const std::string&)>& log);

/// Throws std::invalid_argument unless certificate, key and authority can be used.
void check_tls(const TlsOptions& options);

}  // namespace tessera::serving
