// tessera/graph_parallel/halo_plan.h — the rows a rank needs from its neighbours.
//
// A HaloPlan is built once per graph and used by every layer. An exchange is linear in the number
// of boundary rows, not in the size of the graph.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/graph_parallel/partition.h"

namespace tessera::graph_parallel {

struct HaloOptions {
  /// Every edge has its mirror image somewhere: each rank then knows what its neighbours need, and
  /// no node ids are exchanged.
  bool is_symmetric = false;
  /// Compare partitions, edges and what will be sent with what is expected, over the ranks. Without
  /// it, a symmetric plan is built without any message.
  bool check = true;
  /// Type in which rows travel, e.g. at::kBFloat16; sums are made in the rows' own type. Unset: the
  /// rows' own. The gradient is that of the exchange without rounding.
  std::optional<at::ScalarType> payload;
  /// Add up arriving gradients in a fixed order on every device. The CPU always does.
  bool deterministic = false;
};

/// The positions of the edges whose targets `part` owns; `edge_index` is [2, num_edges], sources
/// then targets. Not collective. Throws ValueError for an edge to a node there is not.
TESSERA_API at::Tensor edges_of_part(const at::Tensor& edge_index, const Partition& partition,
                                     int part);

/// Who sends which rows to whom. Immutable; copies are cheap.
///
/// Local numbering: owned rows are [0, num_owned), in the order of Partition::nodes_of; halo rows
/// follow, ordered by owner and then by global id.
class TESSERA_API HaloPlan {
 public:
  /// Builds the plan of this rank, part `group.rank()` of the partition, for the edges whose
  /// targets it owns, in global ids.
  ///
  /// Collective. Two small all-to-alls, none for a symmetric graph; with `check`, a few numbers per
  /// pair of ranks more. Throws ValueError for an edge to a node there is not or with a target of
  /// another rank, and comm::Error(kMismatch) on all ranks when partitions differ or a graph called
  /// symmetric is not.
  HaloPlan(const Partition& partition, const at::Tensor& edge_index, const comm::Group& group,
           const HaloOptions& options = {});

  const Partition& partition() const noexcept;
  const comm::Group& group() const noexcept;
  const HaloOptions& options() const noexcept;

  std::int64_t num_owned() const noexcept;
  std::int64_t num_halo() const noexcept;
  /// num_owned + num_halo.
  std::int64_t num_local() const noexcept;

  /// [num_local]: global ids in local numbering.
  const at::Tensor& nodes() const noexcept;
  /// [num_halo]: global ids of the halo rows.
  at::Tensor halo_nodes() const;

  /// [num_sent]: local numbers of the owned rows that travel, ordered by receiver.
  const at::Tensor& send_index() const noexcept;
  /// The same on `device`; copied there once.
  at::Tensor send_index(at::Device device) const;
  /// Rows sent to, and received from, each rank.
  const std::vector<std::int64_t>& send_rows() const noexcept;
  const std::vector<std::int64_t>& recv_rows() const noexcept;
  std::int64_t num_sent() const noexcept;

  /// [2, num_edges] in local numbering, in the order given.
  const at::Tensor& local_edges() const noexcept;
  /// Positions of the edges whose source is owned, and of those whose source is in the halo.
  const at::Tensor& interior() const noexcept;
  const at::Tensor& boundary() const noexcept;

  /// Compares, by global id, what every rank sends with what its receiver expects. Collective; for
  /// tests and doubts. Throws comm::Error(kMismatch) naming the pair.
  void verify() const;

 private:
  struct State;
  std::shared_ptr<const State> state_;
};

}  // namespace tessera::graph_parallel
