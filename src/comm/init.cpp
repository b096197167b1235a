#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/network.h"
#include "comm/rendezvous.h"
#include "comm/start_thread.h"
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
c10::intrusive_ptr<c10d::Store> connect_own_store(
    const Environment& environment, const core::Secret& secret, std::chrono::milliseconds timeout,
    std::shared_ptr<store::HostedServer> server = nullptr) {
  store::Place place{.path = "", .host = environment.master_addr, .port = environment.master_port};
  if (!environment.store.empty()) place = store::Place::parse(environment.store);
  if (!server && hosts_store(environment)) {
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
  auto connect = [promise = std::move(promise), address = environment.master_addr,
                  options]() mutable {
    try {
      promise.set_value(c10::make_intrusive<c10d::TCPStore>(address, options));
    } catch (...) {
      promise.set_exception(std::current_exception());
    }
  };
  try {
    start_thread("comm.init", std::move(connect)).detach();
  } catch (const Error&) {
    if (options.masterListenFd) ::close(*options.masterListenFd);
    throw;
  }
  try {
    if (result.wait_for(timeout + kStoreSlack) == std::future_status::ready) return result.get();
  } catch (const std::system_error& refusal) {
    throw refused_thread("comm.init", refusal);  // the store has threads of its own
  } catch (const std::exception&) {
    // Told below.
  }
  throw_no_store(environment, timeout);
}

// Under torchrun the agent hosts a store that asks for nothing. With a secret it serves for one
// word: where rank 0 hosts the job's own. That word is signed, so whoever changes it ends the job,
// and no more.
c10::intrusive_ptr<c10d::Store> connect_beside_agent(const Environment& environment,
                                                     const std::string& prefix,
                                                     const core::Secret& secret,
                                                     std::chrono::milliseconds timeout) {
  static std::atomic<int> num_made{0};  // the same on all ranks: each time is collective
  const std::string key = prefix + "/place/" + std::to_string(num_made++);
  const auto agent = connect_tcp_store(environment, timeout);
  const auto seal_of = [&](const std::string& place) {
    return core::hex_of(core::bytes_of(secret.sign("store of " + key + ": " + place)));
  };
  std::shared_ptr<store::HostedServer> server;
  if (environment.rank == 0) {
    const bool is_one_host = environment.local_world_size == environment.world_size;
    const std::string address = is_one_host ? "127.0.0.1" : address_towards_peers();
    Socket listener = listen_on_free_port(address);
    const std::string place = "tcp:" + address + ":" + std::to_string(port_of(listener));
    server = std::make_shared<store::HostedServer>(::dup(listener.get()), secret);
    set_text(*agent, key, place + " " + seal_of(place));
  }
  std::string said;
  try {
    said = get_text(*agent, key);
  } catch (const c10::Error&) {
    throw_no_store(environment, timeout);
  }
  const std::string place = said.substr(0, said.find(' '));
  if (!core::same_bytes(said, place + " " + seal_of(place))) {
    throw Error(
        ErrorKind::kRendezvous, {0},
        "comm.init: what torchrun's store says of the job's own store was not written by a "
        "process with the secret of rank " +
            std::to_string(environment.rank) +
            ". Give every process of the job the same TESSERA_JOB_SECRET_FILE, and look who "
            "else reaches " +
            environment.master_addr + ":" + std::to_string(environment.master_port) + ".");
  }
  Environment own = environment;
  own.store = place;
  return connect_own_store(own, secret, timeout, std::move(server));
}

}  // namespace

void check_open_store(const Environment& environment) {
  if (environment.world_size == 1) return;
  const std::string place = environment.master_addr + ":" + std::to_string(environment.master_port);
  const char* wish = std::getenv("TESSERA_INSECURE_NO_AUTH");
  TESSERA_CHECK_VALUE(
      (wish != nullptr && std::string(wish) == "1") || is_private(environment.master_addr),
      "comm.init: the store of this job at ", place,
      " asks for no secret, and MASTER_ADDR is a public address. Give all ranks a "
      "TESSERA_JOB_SECRET_FILE, use an address of a private network, or set "
      "TESSERA_INSECURE_NO_AUTH=1.");
  static std::atomic<bool> is_told{false};
  if (environment.rank != 0 || is_told.exchange(true)) return;
  std::fprintf(
      stderr,
      "[tessera] the store of this job at %s asks for no secret: whoever reaches it can "
      "change what the ranks agree on. Start the job with tessera run, or give all ranks a "
      "TESSERA_JOB_SECRET_FILE.\n",
      place.c_str());
}

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
  if (secret) {
    const bool is_own = !environment.store.empty() || !environment.agent_store;
    return c10::make_intrusive<c10d::PrefixStore>(
        prefix, is_own ? connect_own_store(environment, *secret, timeout)
                       : connect_beside_agent(environment, prefix, *secret, timeout));
  }
  check_open_store(environment);
  return c10::make_intrusive<c10d::PrefixStore>(prefix, connect_tcp_store(environment, timeout));
}

Group init(const GroupOptions& options) {
  const Environment environment = read_environment();
  install_failure_handler();
  // The store, of which rank 0 may be the host. Without this, what cannot be opened would look like
  // a store that is not there.
  constexpr std::size_t kFilesToMeet = 24;
  make_room_for_files(kFilesToMeet, "to meet the other ranks this one");
  const auto store = connect_store(environment, options.timeout);
  try {
    return make_group(store, environment.rank, environment.world_size, options);
  } catch (const Error&) {
    if (hosts_store(environment) || (environment.rank == 0 && environment.agent_store)) {
      await_farewells(*store, Clock::now() + kFarewellLimit);
    }
    throw;
  }
}

}  // namespace tessera::comm
