// src/comm/store/hosted_server.h — the job's store in a thread of rank 0, where no launcher has it.

#pragma once

#include <thread>

#include "comm/network.h"
#include "comm/own_process.h"
#include "comm/store/server.h"

namespace tessera::comm::store {

class HostedServer {
 public:
  /// Takes over a listening socket and serves on it until destroyed.
  HostedServer(int listener, core::Secret secret);
  ~HostedServer();
  HostedServer(const HostedServer&) = delete;
  HostedServer& operator=(const HostedServer&) = delete;

 private:
  const pid_t maker_ = own_pid();  // a forked child has no such thread
  Socket stop_;                    // the server ends when something is written here
  std::thread thread_;
};

}  // namespace tessera::comm::store
