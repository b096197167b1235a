// src/comm/store/table.h — the keys and values of a job's store, and who waits for which.
//
// Knows nothing of connections: a client is a number. No LibTorch.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "comm/store/wire.h"

namespace tessera::comm::store {

using Client = std::uint64_t;

class Table {
 public:
  /// `answer` is called for every request, at once or when what it waits for has come.
  explicit Table(std::function<void(Client, Packet)> answer) : answer_(std::move(answer)) {}

  /// One request. Throws WireError if it makes no sense.
  void serve(Client client, const Packet& request);
  /// The client is gone.
  void forget(Client client);

 private:
  struct Waiting {
    std::vector<std::string> keys;
    Operation operation;
  };

  bool has(const std::string& key) const;
  void set(const std::string& key, std::string value);
  void await(Client client, Waiting waiting);
  bool try_to_answer(Client client, const Waiting& waiting);
  void wake(const std::string& key);
  void done(Client client, std::vector<std::string> parts = {});

  std::function<void(Client, Packet)> answer_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::deque<std::string>> queues_;
  std::map<Client, Waiting> waiting_;
  std::map<std::string, std::set<Client>> waiting_for_;
};

}  // namespace tessera::comm::store
