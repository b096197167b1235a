#include "tessera/serving/server.h"

#include <new>
#include <optional>
#include <stdexcept>

#include "serving/server_process.h"
#include "serving/shared_memory.h"
#include "serving/updater.h"

namespace tessera::serving {
namespace {

constexpr int kLostRequests = 70;

}  // namespace

int serve(Model& model, const ServerOptions& options,
          const std::function<void(const ServerPorts&)>& on_ready,
          const std::function<void(const std::string&)>& log) {
  if (!options.tls.certificate.empty()) check_tls(options.tls);
  Model::Canary canary;
  if (!options.canary.empty()) {
    try {
      auto now = model.lease();
      canary = canary_of(options.canary, options.canary_bound, now.model());
      canary(now, now);  // its requests are fit to be asked
    } catch (const std::exception& error) {
      throw std::invalid_argument(error.what());
    }
  }
  const Listener data(options.host, options.port);
  std::optional<Listener> admin;
  if (options.admin_port >= 0) admin.emplace("127.0.0.1", options.admin_port);
  const SharedMemory memory("tessera-metrics", sizeof(Metrics));
  Metrics& metrics = *new (memory.data()) Metrics;
  const auto ready = [&] { on_ready({data.port(), admin ? admin->port() : 0}); };
  int code = 0;
  if (options.processes > 1) {
    code = supervise(model, options, data, admin ? &*admin : nullptr, metrics, ready, log);
  } else {
    std::optional<Updater> updater;
    if (!options.watched.empty()) {
      updater.emplace(model, metrics.updates, options.watched, canary, log);
      updater->start();
    }
    code = run_server_process(
        model, options, {data, admin ? &*admin : nullptr, metrics, 0, 1, true, nullptr, nullptr},
        ready, log);
  }
  log("answered " + std::to_string(metrics.num_answered()) + " of " +
      std::to_string(metrics.received.load()) + " requests, " +
      std::to_string(metrics.cancelled.load()) + " of them to clients that were gone");
  if (code == 0 && metrics.num_lost() != 0) {
    log(std::to_string(metrics.num_lost()) + " requests were not answered: a fault of the server");
    return kLostRequests;
  }
  return code;
}

}  // namespace tessera::serving
