// src/comm/hierarchical_transport.h — shared memory inside each host, Gloo between hosts.
//
// The first rank of each host is its leader. Reductions, gathers and broadcasts go up to the leader
// through shared memory, across once per host by Gloo, and down again. What has a different part
// for every pair of ranks (all_to_all, gather, scatter, messages) goes over Gloo directly.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/call_table.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/monitor.h"
#include "comm/transport.h"
#include "tessera/comm/group.h"

namespace tessera::comm {

class HierarchicalTransport final : public Transport {
 public:
  /// Collective over the monitor's members. Throws Failure(kUnavailable), on all ranks, if one host
  /// cannot give shared memory.
  static std::shared_ptr<HierarchicalTransport> create(const c10::intrusive_ptr<c10d::Store>& store,
                                                       const std::shared_ptr<GroupMonitor>& monitor,
                                                       const GroupOptions& options,
                                                       const std::string& address,
                                                       Clock::time_point deadline);

  int rank() const noexcept override { return monitor_->rank(); }
  int size() const noexcept override { return static_cast<int>(monitor_->members().size()); }
  std::string_view name() const noexcept override { return "shm+gloo"; }

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
  std::shared_ptr<void> allocate(std::size_t bytes) override { return local_->allocate(bytes); }
  void abort(FailureKind kind, std::vector<int> ranks, const std::string& reason) override;

 private:
  explicit HierarchicalTransport(std::shared_ptr<GroupMonitor> monitor);

  bool is_leader() const noexcept { return local_rank_ == 0; }
  /// Makes sure that all ranks of all hosts are about to do the same.
  void agree(const Call& call, std::int64_t count, std::span<const Piece> inputs,
             std::span<const Piece> outputs);
  /// Runs `body`; a failure in one of the two levels becomes the whole group's.
  template <class Body>
  void guard(const Body& body);
  /// The bytes of all ranks' pieces, host by host, on every rank.
  std::vector<std::byte> gather_bytes(const Call& call, const void* data, std::int64_t bytes,
                                      const std::vector<std::int64_t>& bytes_of_rank);

  std::shared_ptr<GroupMonitor> monitor_;
  std::vector<std::vector<int>> hosts_;  // group ranks of each host, in order of their first rank
  std::vector<int> host_index_;          // of each group rank
  int host_ = 0;
  int local_rank_ = 0;
  std::shared_ptr<GroupMonitor> local_monitor_;
  std::shared_ptr<GroupMonitor> leaders_monitor_;
  std::shared_ptr<FailureChannel> channel_;
  std::shared_ptr<GlooTransport> flat_;
  std::shared_ptr<Transport> local_;
  std::shared_ptr<GlooTransport> leaders_;  // on leaders only
  CallTable table_;
};

}  // namespace tessera::comm
