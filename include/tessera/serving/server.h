// tessera/serving/server.h — answers HTTP requests with a model: the Open Inference Protocol,
// version 2. docs/serving.md has the routes, codes and limits.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "tessera/core/export.h"
#include "tessera/serving/model.h"

namespace tessera::serving {

/// What a request may ask for. Beyond it is an error that names the limit, before memory is spent.
struct ServerLimits {
  std::uint64_t body_bytes = std::uint64_t{16} << 20;
  std::uint32_t header_bytes = 16 << 10;
  int connections = 1024;
  std::int64_t ids_per_sample = 100'000;
  std::int64_t ids_per_request = std::int64_t{1} << 20;
  std::int64_t samples_per_request = 65'536;
  std::chrono::milliseconds header_time{5'000};    // from the first byte to the end of the headers
  std::chrono::milliseconds idle_time{60'000};     // between two requests of a connection
  std::chrono::milliseconds request_time{30'000};  // to read a body, and to write an answer
};

/// TLS 1.2 or later on the data port.
struct TlsOptions {
  std::string certificate;       // PEM, the chain; empty: no TLS
  std::string key;               // PEM
  std::string client_authority;  // PEM: only clients with a certificate of it are let in
};

struct ServerOptions {
  std::string host = "127.0.0.1";  // an address, or unix:PATH
  int port = 8000;                 // 0: a free one
  int admin_port = 8001;           // always on 127.0.0.1; 0: a free one, -1: none
  std::string package;             // what a reload opens again
  std::string token;               // empty: everybody is let in
  TlsOptions tls;
  int processes = 1;  // that answer, over one copy of the tables
  /// A folder into which a training publishes: its versions are taken over. The model must have
  /// been opened with `keep_versions`.
  std::string watched;
  std::string canary;       // a file of requests that each new version must answer sensibly
  double canary_bound = 1;  // how far a probability may move there
  ModelOptions model;       // how a reload opens the package: as it was opened first
  /// Bytes of tables that are brought into memory before the server is ready. Requests of all sizes
  /// are computed then too, so that the first ones find everything in place.
  std::int64_t warm_bytes = std::int64_t{1} << 30;
  /// Compare the rows with their sums while they are served; a difference ends the answers. For
  /// packages that were not verified when they were opened.
  bool verifies_later = true;
  int io_threads = 1;
  int workers = 1;               // threads that compute
  std::int64_t max_batch = 256;  // samples that are computed together
  std::chrono::microseconds batch_wait{0};
  std::chrono::milliseconds latency_budget{20};
  std::int64_t queue_samples = 65'536;
  std::uint64_t queue_bytes = std::uint64_t{256} << 20;
  std::chrono::milliseconds drain_time{10'000};
  ServerLimits limits;
};

struct ServerPorts {
  int data = 0;   // 0: a Unix socket
  int admin = 0;  // 0: none
};

/// Serves until SIGTERM or SIGINT, then finishes what was accepted, and returns 0; 75 if that took
/// longer than `drain_time`; 70 if a request was lost all the same, or processes died again and
/// again. SIGHUP opens the package again. `on_ready` is called once, when
/// requests are answered; `log` gets lines about what goes wrong. Throws std::system_error naming
/// an address that cannot be had, std::invalid_argument naming a certificate, key or canary that
/// cannot be used. `model` must outlive it.
///
/// With several processes the caller becomes the one that watches over them, and must have no
/// threads: a process that dies is started again, and what it had not answered is all that is lost.
TESSERA_API int serve(Model& model, const ServerOptions& options,
                      const std::function<void(const ServerPorts&)>& on_ready,
                      const std::function<void(const std::string&)>& log);

/// Whether this build can, and whether with TLS.
TESSERA_API bool has_server() noexcept;
TESSERA_API bool has_tls() noexcept;

}  // namespace tessera::serving
