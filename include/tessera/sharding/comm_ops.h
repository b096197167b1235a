// tessera/sharding/comm_ops.h — the exchanges between tables on different ranks, differentiable.
//
// Every function is collective over its group: all ranks call it, in the same order. It starts the
// exchange and returns at once; `wait` gives the result. In the backward pass the reverse exchange
// starts when the gradient of the result is known and is waited for when the gradient of the input
// is needed, so that it runs beside whatever autograd does in between. All ranks take part in the
// backward pass if grad mode was on, also those whose input needs no gradient.
//
// Batches, dimensions and splits may be uneven and may be zero. A group of one rank sends nothing.
// Gradients are not differentiable again.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"
#include "tessera/comm/codec.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"

namespace tessera::sharding {

using Sizes = std::vector<std::int64_t>;
/// A tensor under way.
using Request = comm::Awaitable<at::Tensor>;
using ListRequest = comm::Awaitable<std::vector<at::Tensor>>;

/// Whether the gradients of an exchange are divided by the size of its group. On by default: when
/// every rank's loss is a mean over its own batch, the gradients of sharded tables then equal those
/// that data parallelism averages. Process-wide.
TESSERA_API void set_gradient_division(bool is_on);
TESSERA_API bool get_gradient_division() noexcept;

class Exchange;
class Journey;

/// An exchange that is known and has not started. `run` starts it and lets autograd record it. The
/// other steps are for whoever keeps the graph: each once, in this order, on all ranks; they record
/// nothing, and the input need not be kept.
class TESSERA_API PlannedExchange {
 public:
  /// Null: the group has one rank, and its input is the result.
  explicit PlannedExchange(std::shared_ptr<Exchange> exchange);

  Request run(const at::Tensor& input) const;

  void start(const at::Tensor& input);
  at::Tensor wait();
  void start_backward(const at::Tensor& gradient);
  at::Tensor wait_backward();

 private:
  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<Journey> journey_;
};

/// Pooled embeddings of this rank's tables for everybody's samples become everybody's tables for
/// this rank's samples.
///
/// `pooled` is [sum of batch_size_per_rank, dim_sum_per_rank[rank]], rows in rank order. The result
/// is [batch_size_per_rank[rank], sum of dim_sum_per_rank], columns in rank order.
TESSERA_API Request alltoall_pooled(const at::Tensor& pooled, const Sizes& batch_size_per_rank,
                                    const Sizes& dim_sum_per_rank, const comm::Group& group,
                                    const comm::Codecs& codecs = {});

/// As alltoall_pooled, with a batch size for every rank and feature, all tensors 1-D.
///
/// `batch_size_per_rank_per_feature[r][f]` is rank r's batch of this rank's feature f;
/// `batch_size_per_feature_pre_a2a` this rank's batch of every feature, in order of the ranks that
/// hold them; `emb_dim_per_rank_per_feature[r][f]` the dimension of rank r's feature f. The result
/// holds ranks, their features, samples, values, in this order.
TESSERA_API Request variable_batch_alltoall_pooled(
    const at::Tensor& pooled, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& batch_size_per_feature_pre_a2a,
    const std::vector<Sizes>& emb_dim_per_rank_per_feature, const comm::Group& group,
    const comm::Codecs& codecs = {});

/// Brings embeddings of single ids back to the ranks that sent the ids.
///
/// `embeddings` is [number of ids received, dim], ordered by feature, rank, sample. `lengths` are
/// those of the ids received, in the same order. `input_splits` and `output_splits` are the numbers
/// of ids this rank sent to and received from each rank. `forward_recat` orders the segments of
/// `lengths` by rank first, `backward_recat` undoes it; a segment is one entry of `lengths`, or
/// several if there are fewer segments than entries. The result has the order of the ids this rank
/// sent.
TESSERA_API Request alltoall_sequence(const at::Tensor& embeddings, const at::Tensor& forward_recat,
                                      const at::Tensor& backward_recat, const at::Tensor& lengths,
                                      const Sizes& input_splits, const Sizes& output_splits,
                                      const comm::Group& group, const comm::Codecs& codecs = {});

/// Cuts the samples of all inputs ([batch, dim] each) as evenly as possible over the ranks, the
/// first ones get one more, and returns per rank its columns for this rank's samples.
/// `out_split[r]` is the sum of rank r's dims. Gradients are not divided.
TESSERA_API ListRequest alltoallv(const std::vector<at::Tensor>& inputs, const Sizes& out_split,
                                  const comm::Group& group, const comm::Codecs& codecs = {});

/// Rank r gets the sum of all ranks' inputs[r]. Shapes may differ between r, not between ranks.
TESSERA_API Request reduce_scatter_pooled(const std::vector<at::Tensor>& inputs,
                                          const comm::Group& group,
                                          const comm::Codecs& codecs = {});

/// Sums over the ranks and cuts the rows evenly. Throws ValueError if they cannot be.
TESSERA_API Request reduce_scatter_base_pooled(const at::Tensor& input, const comm::Group& group,
                                               const comm::Codecs& codecs = {});

/// As reduce_scatter_base_pooled, with `input_splits[r]` rows for rank r.
TESSERA_API Request reduce_scatter_v_pooled(const at::Tensor& input, const Sizes& input_splits,
                                            const comm::Group& group,
                                            const comm::Codecs& codecs = {});

/// As reduce_scatter_v_pooled on a 1-D tensor of ranks, features, samples, values: rank r gets
/// `batch_size_per_rank_per_feature[r][f]` samples of `embedding_dims[f]` values for each feature.
TESSERA_API Request reduce_scatter_v_per_feature_pooled(
    const at::Tensor& input, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& embedding_dims, const comm::Group& group, const comm::Codecs& codecs = {});

/// Stacks the ranks' rows, in rank order. All ranks give the same shape.
TESSERA_API Request all_gather_base_pooled(const at::Tensor& input, const comm::Group& group,
                                           const comm::Codecs& codecs = {});

/// The same exchanges before they start. What is wrong with the sizes is thrown here, before
/// anything is sent. The inputs of alltoallv are side by side, those of reduce_scatter_pooled flat
/// and one after the other; results of alltoallv are side by side too.
namespace planned {

TESSERA_API PlannedExchange alltoall_pooled(const at::Tensor& pooled,
                                            const Sizes& batch_size_per_rank,
                                            const Sizes& dim_sum_per_rank, const comm::Group& group,
                                            const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange variable_batch_alltoall_pooled(
    const at::Tensor& pooled, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& batch_size_per_feature_pre_a2a,
    const std::vector<Sizes>& emb_dim_per_rank_per_feature, const comm::Group& group,
    const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange alltoall_sequence(const at::Tensor& embeddings,
                                              const at::Tensor& forward_recat,
                                              const at::Tensor& backward_recat,
                                              const at::Tensor& lengths, const Sizes& input_splits,
                                              const Sizes& output_splits, const comm::Group& group,
                                              const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange alltoallv(const at::Tensor& columns, const Sizes& out_split,
                                      const comm::Group& group, const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange reduce_scatter_pooled(const std::vector<Sizes>& shapes,
                                                  const comm::Group& group,
                                                  const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange reduce_scatter_base_pooled(const at::Tensor& input,
                                                       const comm::Group& group,
                                                       const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange reduce_scatter_v_pooled(const at::Tensor& input,
                                                    const Sizes& input_splits,
                                                    const comm::Group& group,
                                                    const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange reduce_scatter_v_per_feature_pooled(
    const at::Tensor& input, const std::vector<Sizes>& batch_size_per_rank_per_feature,
    const Sizes& embedding_dims, const comm::Group& group, const comm::Codecs& codecs = {});
TESSERA_API PlannedExchange all_gather_base_pooled(const at::Tensor& input,
                                                   const comm::Group& group,
                                                   const comm::Codecs& codecs = {});

}  // namespace planned
}  // namespace tessera::sharding
