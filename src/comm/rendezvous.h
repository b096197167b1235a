// src/comm/rendezvous.h — how ranks find each other on a store and agree on an engine.

#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/backend.h"
#include "comm/failure_channel.h"
#include "comm/monitor.h"
#include "comm/transport.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

/// A c10d store as the transports see it.
class StoreBootstrap final : public Bootstrap {
 public:
  explicit StoreBootstrap(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override;
  std::string get(const std::string& key, Clock::time_point deadline) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

/// Makes the engine of one rank of a group that meets on `store`. Collective over the group; may be
/// repeated on the same store by the same processes.
///
/// Throws ValueError for a rank outside the size; Error(kRendezvous) naming the ranks that did not
/// come, came twice, or expect another size; Error(kUnavailable) if Engine::kShm cannot be had.
/// The members of its monitor tell the others' `gpus_for_nccl`.
c10::intrusive_ptr<EngineBackend> make_engine(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int size, const GroupOptions& options,
                                              int gpus_for_nccl = 0);

/// Waits until every rank that came to make a group on `store`, and could not, knows why.
/// For the rank whose process hosts the store: when it ends, the others can read nothing any more.
void await_farewells(c10d::Store& store, Clock::time_point limit) noexcept;

/// The channel for failures of the monitor's group, which the monitor reads from then on. Other
/// ranks reach this one by `address`.
std::shared_ptr<FailureChannel> make_channel(const c10::intrusive_ptr<c10d::Store>& store,
                                             GroupMonitor& monitor, const std::string& address);

/// Store values as text.
std::string get_text(c10d::Store& store, const std::string& key);
void set_text(c10d::Store& store, const std::string& key, const std::string& value);

}  // namespace tessera::comm
