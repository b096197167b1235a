// tessera/jagged/operators.h — operators on rows of different lengths, laid end to end.
//
// Jagged data is `values` (its first dimension runs over the elements of all bags, bag after bag)
// and `lengths`, one per bag, int32 or int64. Nothing here communicates.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/core/export.h"

namespace tessera::jagged {

/// Returns [n + 1]: 0 and the running sums of `lengths`, in the type of `lengths`.
///
/// Throws TypeError for lengths that are not int32 or int64; on the CPU also ValueError for a
/// negative length and for a sum that an int32 cannot hold.
TESSERA_API at::Tensor lengths_to_offsets(const at::Tensor& lengths);

/// The inverse of lengths_to_offsets: [n + 1] to [n].
TESSERA_API at::Tensor offsets_to_lengths(const at::Tensor& offsets);

/// Returns [num_values] int64: the position of each element inside its bag.
TESSERA_API at::Tensor offsets_range(const at::Tensor& offsets, std::int64_t num_values);

/// Lengths with the values they describe; `weights` may be undefined.
struct JaggedParts {
  at::Tensor lengths;
  at::Tensor values;
  at::Tensor weights;
};

/// Returns the bags `order[0]`, `order[1]`, …; repeats and subsets are allowed.
///
/// `lengths` is [n]. Values and weights may have any trailing shape and are differentiable any
/// number of times; gradients of a repeated bag add up.
TESSERA_API JaggedParts permute_1d(const at::Tensor& order, const at::Tensor& lengths,
                                   const at::Tensor& values, const at::Tensor& weights = {});

/// The same for rows of bags: `lengths` is [rows, bags per row], a row moves as a whole.
TESSERA_API JaggedParts permute_2d(const at::Tensor& order, const at::Tensor& lengths,
                                   const at::Tensor& values, const at::Tensor& weights = {});

/// Returns the segments `order[0]`, `order[1]`, … of the first dimension of `data`, which `sizes`
/// cuts into segments. Differentiable like permute_1d.
TESSERA_API at::Tensor permute_segments(const at::Tensor& data,
                                        const std::vector<std::int64_t>& sizes,
                                        const std::vector<std::int64_t>& order);

/// How ids are spread over buckets. Features come one after the other.
struct BucketizeOptions {
  std::int64_t num_buckets = 1;
  /// Number of bags of each feature.
  std::vector<std::int64_t> bags_per_feature;
  /// Ids per bucket of each feature.
  std::vector<std::int64_t> block_sizes;
  /// Uneven blocks: for each feature num_buckets + 1 ids, the first of each bucket and the end of
  /// the last; empty for a feature (or altogether) with even blocks.
  std::vector<std::vector<std::int64_t>> block_starts;
  /// Also returns the position of each element inside its bag.
  bool positions = false;
  /// Also returns where each element went.
  bool unbucketize = false;
};

struct Bucketized {
  /// Bucket by bucket, then feature, then bag: num_buckets times as many as before.
  at::Tensor lengths;
  /// The ids inside their buckets; the order inside a bag is kept.
  at::Tensor values;
  /// The weights, moved along; undefined if there were none.
  at::Tensor weights;
  /// Positions inside the original bags, in the type of `values`; undefined unless asked for.
  at::Tensor positions;
  /// For element i of the input, its place in the output, int64; undefined unless asked for.
  at::Tensor unbucketize_permute;
};

/// Spreads ids over buckets, as row-wise sharding does.
///
/// Even blocks: bucket id / block, new id = id mod block. Uneven blocks: the bucket whose range
/// holds the id, new id = id - start. An id past the last block, or negative (ids are compared as
/// unsigned numbers), is not refused: bucket id mod num_buckets, new id = id / num_buckets.
/// Gradients flow to weights.
TESSERA_API Bucketized bucketize(const at::Tensor& lengths, const at::Tensor& values,
                                 const at::Tensor& weights, const BucketizeOptions& options);

struct UniqueIds {
  /// The different ids of each space, ascending, space after space.
  at::Tensor ids;
  /// As many as before, adding up to the number of ids; those of a space are spread evenly over
  /// its bags, so that the ids still form jagged data.
  at::Tensor lengths;
  /// For element i of the input, its place in `ids`, int64.
  at::Tensor reverse_index;
};

/// Removes repeated ids. `bags_per_space[s]` consecutive bags share one space of ids (the features
/// of one table).
TESSERA_API UniqueIds unique_ids(const at::Tensor& lengths, const at::Tensor& values,
                                 const std::vector<std::int64_t>& bags_per_space);

/// Returns [bags, max_length, ...]: each bag in a row of its own, cut at `max_length`, filled up
/// with `padding_value`. Differentiable any number of times.
TESSERA_API at::Tensor jagged_to_padded_dense(const at::Tensor& values, const at::Tensor& offsets,
                                              std::int64_t max_length, double padding_value = 0.0);

/// The way back: [num_values, ...] out of [bags, max_length, ...]. Elements past `max_length` are
/// zero. Differentiable any number of times.
TESSERA_API at::Tensor padded_dense_to_jagged(const at::Tensor& dense, const at::Tensor& offsets,
                                              std::int64_t num_values);

}  // namespace tessera::jagged
