// src/comm/store/server.h — serves a job's store to those who prove the job's secret.
//
// One thread, one poll loop. Strangers have a few seconds and a few bytes, are told nothing, and
// when too many come the oldest goes. On a Unix socket the kernel says who connects, and only this
// user and root are heard at all. No LibTorch.

#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "comm/store/session.h"
#include "comm/store/table.h"
#include "core/secret.h"

namespace tessera::comm::store {

class Server {
 public:
  /// Takes over a listening socket that does not block.
  Server(int listener, core::Secret secret);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  /// Serves until `stop` can be read or its other end is closed.
  void run(int stop);

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    int socket = -1;
    Session session;
    Clock::time_point deadline;  // of a stranger
  };

  void accept_some();
  bool accept_one();
  void read_from(Client id, Connection& connection);
  static void write_to(Connection& connection);
  void answer(Client id, const Packet& packet);
  void remove_ended();
  bool is_accepting() const;
  int milliseconds_to_next() const;

  const int listener_;
  const core::Secret secret_;
  const bool is_local_;
  std::map<Client, Connection> connections_;
  std::set<Client> strangers_;  // oldest first
  Clock::time_point accepting_from_{};
  Client next_id_ = 0;
  Table table_;
};

}  // namespace tessera::comm::store
