#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/network.h"
#include "comm/rendezvous.h"
#include "comm/store/auth_store.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/error.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/group.h"
#include "tessera/comm/store.h"
#include "tessera/core/check.h"

namespace tessera::comm {
namespace {

// The rank that hosts the store stays this long for ranks that still have to read why they failed.
constexpr auto kFarewellLimit = std::chrono::seconds(2);
// A port may be held by a program that accepts and never answers, which the store's own limit does
// not cover. It gets this much longer, so that the store's own report comes first.
constexpr auto kStoreSlack = std::chrono::seconds(1);

bool hosts_store(const Environment& environment) {
  return environment.launcher != "none" && environment.rank == 0 && !environment.agent_store &&
         environment.store.empty();
}

[[noreturn]] void throw_no_store(const Environment& environment,
                                 std::chrono::milliseconds timeout) {
  throw Error(ErrorKind::kRendezvous, {0},
              "comm.init: rank " + std::to_string(environment.rank) +
                  " found no store at MASTER_ADDR " + environment.master_addr + ", MASTER_PORT " +
                  std::to_string(environment.master_port) + " within " +
                  std::to_string(timeout.count() / 1000) +
                  " s. Check that rank 0 runs and that both variables are the same everywhere.");
}

// The store that asks for the job's secret: the launcher's, or rank 0's.
c10::intrusive_ptr<c10d::Store> connect_own_store(const Environment& environment,
                                                  const core::Secret& secret,
                                                  std::chrono::milliseconds timeout) {
  store::Place place{.path = "", .host = environment.master_addr, .port = environment.master_port};
  if (!environment.store.empty()) place = store::Place::parse(environment.store);
  std::shared_ptr<store::HostedServer> server;
  if (hosts_store(environment)) {
    server = std::make_shared<store::HostedServer>(
        listen_on(environment.master_addr, environment.master_port), secret);
  }
  try {
    return c10::make_intrusive<store::AuthStore>(place, secret, timeout, std::move(server));
  } catch (const store::SecretRefused&) {
    throw Error(ErrorKind::kRendezvous, {0},
                "comm.init: the store at " + place.text() + " does not accept the secret of rank " +
                    std::to_string(environment.rank) +
                    ". Give every process of the job the same TESSERA_JOB_SECRET_FILE.");
  } catch (const Error& error) {
    if (environment.store.empty()) throw_no_store(environment, timeout);
    throw Error(ErrorKind::kRendezvous, {},
                "comm.init: rank " + std::to_string(environment.rank) + " found no store at " +
                    place.text() + " within " + std::to_string(timeout.count() / 1000) +
                    " s: " + error.what() + ". Check that the launcher of the job runs.");
  }
}

void warn_of_open_store(const Environment& environment) {
  if (environment.rank != 0 || environment.world_size == 1) return;
  std::fprintf(
      stderr,
      "[tessera] the store of this job at %s:%d asks for no secret: whoever reaches it can "
      "change what the ranks agree on. Start the job with tessera run%s.\n",
      environment.master_addr.c_str(), static_cast<int>(environment.master_port),
      environment.agent_store ? "" : ", or give all ranks a TESSERA_JOB_SECRET_FILE");
}

c10::intrusive_ptr<c10d::Store> connect_tcp_store(const Environment& environment,
                                                  std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = environment.master_port;
  options.timeout = timeout;
  options.waitWorkers = false;
  options.useLibUV = true;
  if (hosts_store(environment)) {
    // Left to itself the store would listen on every interface, whatever address it is given.
    options.isServer = true;
    options.masterListenFd = listen_on(environment.master_addr, environment.master_port);
  }
  std::promise<c10::intrusive_ptr<c10d::Store>> promise;
  auto result = promise.get_future();
  std::thread([promise = std::move(promise), address = environment.master_addr, options]() mutable {
    try {
      promise.set_value(c10::make_intrusive<c10d::TCPStore>(address, options));
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  }).detach();
  try {
    if (result.wait_for(timeout + kStoreSlack) == std::future_status::ready) return result.get();
  } catch (const std::exception&) {
    // Told below.
  }
  throw_no_store(environment, timeout);
}

}  // namespace

c10::intrusive_ptr<c10d::Store> connect_store(const Environment& environment,
                                              std::chrono::milliseconds timeout) {
  if (environment.launcher == "none") return c10::make_intrusive<c10d::HashStore>();
  // Jobs and attempts that meet on one store must not read each other's keys.
  const std::string prefix =
      "tessera/" + environment.run_id + "/" + std::to_string(environment.restart_count);
  const auto secret = job_secret();
  TESSERA_CHECK_VALUE(environment.store.empty() || secret,
                      "comm.init: TESSERA_STORE is set but TESSERA_JOB_SECRET_FILE is not. Pass "
                      "both on to the ranks; `tessera run` sets them.");
  // torchrun's agent has a store of LibTorch's kind, secret or not.
  if (secret && (!environment.store.empty() || !environment.agent_store)) {
    return c10::make_intrusive<c10d::PrefixStore>(prefix,
                                                  connect_own_store(environment, *secret, timeout));
  }
  warn_of_open_store(environment);
  return c10::make_intrusive<c10d::PrefixStore>(prefix, connect_tcp_store(environment, timeout));
}

Group init(const GroupOptions& options) {
  const Environment environment = read_environment();
  install_failure_handler();
  const auto store = connect_store(environment, options.timeout);
  try {
    return make_group(store, environment.rank, environment.world_size, options);
  } catch (const Error&) {
    if (hosts_store(environment)) {
      await_farewells(*store, Clock::now() + kFarewellLimit);
    }
    throw;
  }
}

}  // namespace tessera::comm
