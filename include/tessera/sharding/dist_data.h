// tessera/sharding/dist_data.h — features to the ranks that own their tables, and rows back.
//
// Everything that takes a group is collective: every rank calls it, in the same order. Results are
// awaited; messages are on their way before.

#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/awaitable.h"
#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/jagged/keyed_jagged_tensor.h"
#include "tessera/sharding/comm_ops.h"

namespace tessera::sharding {

/// The order in which received segments, rank by rank and key by key, become key by key: int64, or
/// undefined if there are no keys.
///
/// Ranks come in the order 0, W / s, 2 W / s, …, 1, W / s + 1, … with s the `stagger`. If the
/// ranks' batches differ, the order is per sample.
TESSERA_API at::Tensor get_recat(std::int64_t local_split, std::int64_t num_splits, int stagger = 1,
                                 const Sizes& batch_size_per_rank = {});

/// Everything a rank knows about an exchange of features before it has heard from the others.
struct TESSERA_API KJTSplitsAllToAllMeta {
  /// `splits[r]` keys go to rank r, in the order of the keys. Throws ValueError if they do not add
  /// up to the keys there are.
  KJTSplitsAllToAllMeta(comm::Group group, const jagged::KeyedJaggedTensor& features,
                        const Sizes& splits, int stagger);

  comm::Group group;
  jagged::KeyedJaggedTensor input;
  /// The keys this rank will have.
  std::vector<std::string> keys;
  /// Rows for each rank, of each tensor that travels.
  std::vector<Sizes> input_splits;
  int stagger;

  /// Lists of W numbers that the ranks tell each other: the above, and the batch size unless the
  /// batch is variable.
  std::vector<Sizes> lists() const;
};

/// Tells every rank its column of `lists` (W numbers each) and returns what this rank is told: as
/// many lists, with rank r's number at r. One small message per pair of ranks, however many lists.
TESSERA_API comm::Awaitable<std::vector<Sizes>> exchange_splits(const std::vector<Sizes>& lists,
                                                                const comm::Group& group);

/// What the second half of an exchange of features has to say besides its features.
struct ReceivedFeatures {
  jagged::KeyedJaggedTensor features;
  /// Numbers of values sent to and received from each rank.
  Sizes input_splits;
  Sizes output_splits;
  /// Batch size of each rank; empty if the batch is variable.
  Sizes stride_per_rank;
  /// The order that was applied to what arrived.
  at::Tensor recat;
};
using KJTAllToAllTensorsAwaitable = comm::Awaitable<ReceivedFeatures>;
using KJTAllToAllSplitsAwaitable = comm::Awaitable<KJTAllToAllTensorsAwaitable>;

/// Sends the tensors; `received` is what exchange_splits returned for meta.lists().
TESSERA_API KJTAllToAllTensorsAwaitable exchange_tensors(const KJTSplitsAllToAllMeta& meta,
                                                         const std::vector<Sizes>& received);

/// Several exchanges of features with one message for all their sizes. All metas are of one group,
/// and in the same order on every rank.
TESSERA_API comm::Awaitable<std::vector<KJTAllToAllTensorsAwaitable>> fused_kjt_alltoall(
    std::vector<KJTSplitsAllToAllMeta> metas);

/// Sends each key to the rank that owns it. Nothing here has a gradient.
class TESSERA_API KJTAllToAll {
 public:
  /// `splits[r]` keys go to rank r. Throws ValueError if there is not one entry per rank, or if the
  /// stagger does not divide the ranks.
  KJTAllToAll(comm::Group group, Sizes splits, int stagger = 1);

  /// Two waits: the first learns the sizes and sends the tensors, the second returns the features
  /// this rank owns, each with the samples of all ranks.
  KJTAllToAllSplitsAwaitable forward(const jagged::KeyedJaggedTensor& features) const;

 private:
  comm::Group group_;
  Sizes splits_;
  int stagger_;
};

/// Cuts features by numbers of keys and copies part i to device i. Nothing is communicated.
TESSERA_API std::vector<jagged::KeyedJaggedTensor> kjt_one_to_all(
    const jagged::KeyedJaggedTensor& features, const Sizes& splits,
    const std::vector<at::Device>& devices);

/// alltoall_pooled; without `batch_size_per_rank` all batches are equal, and the number of rows
/// must be a multiple of the ranks.
TESSERA_API comm::Awaitable<at::Tensor> pooled_embeddings_alltoall(
    const at::Tensor& rows, const Sizes& dim_sum_per_rank, const comm::Group& group,
    const Sizes& batch_size_per_rank = {}, const comm::Codecs& codecs = {});

/// reduce_scatter_v_pooled; without `input_splits` the parts are equal.
TESSERA_API comm::Awaitable<at::Tensor> pooled_embeddings_reduce_scatter(
    const at::Tensor& rows, const comm::Group& group, const Sizes& input_splits = {},
    const comm::Codecs& codecs = {});

/// Rows of single ids back to the ranks that asked; see alltoall_sequence.
struct SequenceOptions {
  /// Where each id this rank had was put before sending; undoes row-wise bucketing.
  at::Tensor unbucketize_permute;
  /// Batch size of each rank, if they differ.
  Sizes batch_size_per_rank;
  /// The order that was applied to the ids when they arrived, if it was not the plain one.
  at::Tensor sparse_features_recat;
};
TESSERA_API comm::Awaitable<at::Tensor> sequence_embeddings_alltoall(
    const at::Tensor& rows, const at::Tensor& lengths, const Sizes& input_splits,
    const Sizes& output_splits, const Sizes& features_per_rank, const comm::Group& group,
    const SequenceOptions& options = {}, const comm::Codecs& codecs = {});

/// Parts that live on several devices, moved to one: side by side along `cat_dim`, or summed.
TESSERA_API at::Tensor embeddings_all_to_one(const std::vector<at::Tensor>& parts,
                                             at::Device device, std::int64_t cat_dim);
TESSERA_API at::Tensor embeddings_all_to_one_reduce(const std::vector<at::Tensor>& parts,
                                                    at::Device device);

}  // namespace tessera::sharding
