// src/comm/store/auth_store.h — the job's store, for those who prove the job's secret.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/own_process.h"
#include "comm/store/hosted_server.h"
#include "comm/store/wire.h"
#include "core/secret.h"
#include "tessera/comm/error.h"

namespace tessera::comm::store {

/// Where a store listens: `unix:PATH` or `tcp:HOST:PORT`.
struct Place {
  std::string path;  // of a Unix socket; empty: TCP
  std::string host;
  std::uint16_t port = 0;

  /// Throws ValueError if `text` is neither.
  static Place parse(const std::string& text);
  std::string text() const;
};

/// The store does not take this process's secret.
class SecretRefused final : public Error {
 public:
  using Error::Error;
};

/// A client of `Server`. Every call is bounded by the timeout and throws c10::DistStoreError when
/// it is over, c10::DistNetworkError when the connection is. Thread-safe; calls of one object wait
/// for each other, a clone has a connection of its own. A forked child cannot use it: both would
/// speak on one connection. It throws ValueError, and may make a clone.
class AuthStore final : public c10d::Store {
 public:
  /// Connects and proves the secret; tries again until the deadline. Throws Error(kRendezvous) with
  /// the reason, SecretRefused at once. `server` is kept alive, if this process has it.
  AuthStore(Place place, core::Secret secret, std::chrono::milliseconds timeout,
            std::shared_ptr<HostedServer> server = nullptr);
  ~AuthStore() override;

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& wanted) override;
  std::vector<std::uint8_t> get(const std::string& key) override;
  std::int64_t add(const std::string& key, std::int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  std::int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;
  void append(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::vector<std::uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<std::uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }
  void queuePush(const std::string& key, const std::vector<std::uint8_t>& value) override;
  std::vector<std::uint8_t> queuePop(const std::string& key, bool block) override;
  std::int64_t queueLen(const std::string& key) override;

  const Place& place() const noexcept { return place_; }

 private:
  class Connection;

  Packet ask(Operation operation, std::vector<std::string> parts);
  Packet ask(Operation operation, std::vector<std::string> parts,
             std::chrono::milliseconds timeout);

  const pid_t maker_ = own_pid();
  const std::shared_ptr<HostedServer> server_;  // ends after the connection
  const Place place_;
  const core::Secret secret_;
  std::mutex mutex_;
  std::unique_ptr<Connection> connection_;  // null once it broke
};

}  // namespace tessera::comm::store
