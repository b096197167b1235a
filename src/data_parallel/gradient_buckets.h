// src/data_parallel/gradient_buckets.h — the gradients of a model, side by side in a few buffers.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"

namespace tessera::data_parallel {

/// Whether an engine of ours carries tensors of `device` through shared memory. It then divides
/// while it adds; Gloo does not, ours as little as LibTorch's.
bool uses_shared_memory(const comm::Group& group, c10::Device device);

/// Sizes of buckets in bytes, as torch's options mean them.
struct BucketLimits {
  std::int64_t cap = 0;
  std::vector<std::size_t> sizes;  // of the first, the second ...; the last one repeats
};
BucketLimits bucket_limits(const Options& options);

/// For every bucket, in the order of reduction, the indices of its parameters.
using BucketCut = std::vector<std::vector<std::size_t>>;

/// Cuts the parameters before the order in which their gradients arrive is known.
BucketCut first_cut(const std::vector<NamedParameter>& parameters, const Options& options);
/// Cuts them in that order: rank 0's, on all ranks. Collective.
BucketCut cut_as_arrived(const std::vector<NamedParameter>& parameters, const Options& options,
                         std::vector<std::size_t> order, const comm::Group& group);

struct GradientBucket {
  std::vector<std::size_t> parameters;  // indices, in the order of the buffer
  bool is_sparse = false;               // holds one sparse gradient
  at::Tensor buffer;                    // flat; or that gradient
  std::vector<at::Tensor> views;        // of each parameter in the buffer; none if sparse
  std::vector<at::Tensor> results;      // where the averages are
  // Of the current iteration:
  std::size_t num_missing = 0;    // gradients that have not arrived
  std::vector<std::size_t> late;  // places in `views` that are copied together, when all are there
  FuturePtr future;               // of the reduced buffer; null if nobody reduces it
};

class GradientBuckets {
 public:
  /// `has_memory` is false for a model whose gradients are never reduced.
  GradientBuckets(const std::vector<NamedParameter>& parameters, const Options& options,
                  comm::Group group, bool has_memory);

  /// Makes new buckets. Gradients become pieces of them, if they are to be.
  void lay_out(BucketCut cut);
  void set_group(comm::Group group) { group_ = std::move(group); }

  std::size_t size() const { return buckets_.size(); }
  GradientBucket& operator[](std::size_t bucket) { return buckets_[bucket]; }
  auto begin() { return buckets_.begin(); }
  auto end() { return buckets_.end(); }
  BucketCut cut() const;
  /// Bytes of every bucket.
  std::vector<std::int64_t> bytes() const;

  GradientBucket& bucket_of(std::size_t parameter) { return buckets_[places_[parameter].first]; }
  /// Which of its bucket's parameters this one is.
  std::size_t slot_of(std::size_t parameter) const { return places_[parameter].second; }
  /// Where the gradient of a parameter lies in its bucket; undefined if it is sparse.
  const at::Tensor& view_of(std::size_t parameter) const;
  /// Whether the gradients of both lie in one bucket.
  bool are_together(std::size_t parameter, std::size_t other) const {
    return places_[parameter].first == places_[other].first;
  }
  /// How many tensors see the memory of the bucket of a parameter: ours, and the gradients of its
  /// parameters.
  std::size_t num_owners(std::size_t parameter) const;
  /// Gives the bucket of a parameter other memory with the same contents. Gradients that are pieces
  /// of it move with it.
  void move_bucket_of(std::size_t parameter) { move(bucket_of(parameter)); }
  /// Gives buckets whose reduction has not ended other memory, where a backward was given up: the
  /// reduction may write to the old one yet. Gradients that are pieces of them are let go of.
  void leave_those_in_flight();

  /// The averages are in `flat`, which may be the buffer itself.
  void set_results(GradientBucket& bucket, const at::Tensor& flat);
  /// A buffer like that of `bucket`, as of a rank without gradients.
  at::Tensor zeros_like(const GradientBucket& bucket) const;

 private:
  std::vector<at::Tensor> parameters_of(const GradientBucket& bucket) const;
  at::Tensor allocate(std::int64_t size, const at::TensorOptions& options) const;
  void make_views(GradientBucket& bucket);
  void move(GradientBucket& bucket);

  const std::vector<NamedParameter>& parameters_;
  bool are_gradients_views_;
  bool has_memory_;
  comm::Group group_;
  std::vector<GradientBucket> buckets_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;  // bucket and slot of each parameter
};

}  // namespace tessera::data_parallel
