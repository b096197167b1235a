// src/comm/gloo/gloo_transport.h — LibTorch's Gloo as a Transport: TCP between hosts, and the
// fall-back.
//
// Gloo trusts its callers: ranks that disagree get garbage, an abort or a hang. So the ranks
// compare their calls first, over connections of their own, and only then let Gloo move data.
// Gloo's own errors name no rank; they are translated into who was lost and during what.

#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/call_exchange.h"
#include "comm/call_table.h"
#include "comm/failure_channel.h"
#include "comm/gloo/message_watch.h"
#include "comm/monitor.h"
#include "comm/transport.h"

namespace tessera::comm {

class GlooTransport final : public Transport {
 public:
  /// Collective over the monitor's members. `address` is the one this rank listens on. `channel`
  /// carries the failures of the whole group, of which these members may be a part.
  GlooTransport(const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<GroupMonitor> monitor,
                std::shared_ptr<FailureChannel> channel, std::chrono::milliseconds timeout,
                const std::string& address, bool check_calls);
  ~GlooTransport() override;

  int rank() const noexcept override { return monitor_->rank(); }
  int size() const noexcept override { return static_cast<int>(monitor_->members().size()); }
  std::string_view name() const noexcept override { return "gloo"; }

  void announce(const Call& call) noexcept override;
  void all_reduce(const Call& call, Piece data) override;
  void reduce(const Call& call, Piece data) override;
  void broadcast(const Call& call, Piece data) override;
  void all_gather(const Call& call, Piece input, std::span<const Piece> outputs) override;
  void gather(const Call& call, Piece input, std::span<const Piece> outputs) override;
  void scatter(const Call& call, std::span<const Piece> inputs, Piece output) override;
  void reduce_scatter(const Call& call, std::span<const Piece> inputs, Piece output) override;
  void all_to_all(const Call& call, std::span<const Piece> inputs,
                  std::span<const Piece> outputs) override;
  void barrier(const Call& call) override;
  void send(const Call& call, Piece data, int destination, int tag) override;
  int recv(const Call& call, Piece data, int source, int tag) override;
  std::shared_ptr<void> allocate(std::size_t) override { return nullptr; }
  void abort(FailureKind kind, std::vector<int> ranks, const std::string& reason) override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  /// Starts an operation of Gloo and waits for it, watching the peers.
  void run(const Call& call, const std::function<Work()>& start);
  /// Makes sure that all ranks are about to do the same.
  void agree(const Call& call, std::int64_t count, std::span<const Piece> inputs = {},
             std::span<const Piece> outputs = {});
  /// Moves bytes between all pairs; element counts times `width`.
  void exchange(const Call& call, std::span<const Piece> inputs, std::span<const Piece> outputs);
  /// As run, for one message from or to `peer`, -1 for any. Returns the rank it came from.
  int run_message(const Call& call, int peer, const std::function<Work()>& start);
  /// What every wait does about every 20 ms; throws Failure to end it.
  void look(const Call& call, std::span<const int> late, Clock::time_point begin);
  /// `says` is what is known without the others: "Gloo says: ...".
  [[noreturn]] void translate(const Call& call, const std::string& says);
  /// Closes all connections, which ends the operations that are under way, here and on the peers.
  void close_connections() noexcept;

  std::shared_ptr<GroupMonitor> monitor_;
  std::shared_ptr<FailureChannel> channel_;
  c10::intrusive_ptr<c10d::Backend> gloo_;
  CallTable table_;
  std::optional<CallExchange> calls_;  // where calls are compared
  bool is_stuck_ = false;              // Gloo holds on to an operation that cannot be ended
  MessageWatch watch_;
};

}  // namespace tessera::comm
