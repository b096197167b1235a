// src/data_parallel/bucket_reducer.h — LibTorch's Reducer, and what a wrapper has to know of it.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "tessera/comm/group.h"
#include "tessera/data_parallel/model_parts.h"
#include "tessera/data_parallel/options.h"

namespace tessera::data_parallel {

/// Where a bucket that a hook is given sits among all buckets.
struct BucketPlace {
  std::size_t index = 0;
  bool is_last = false;
  std::vector<std::size_t> parameters;  // indices, in the order of the buffer
};

/// c10d::Reducer with its cures: buckets that know their place in the first iteration of a static
/// graph, static graphs that begin without synchronisation or with unused parameters, and the
/// names of what is missing.
class BucketReducer final : public c10d::Reducer {
 public:
  using c10d::Reducer::Reducer;

  /// Some gradients of the current backward have been taken over, but not all.
  bool is_unfinished() const { return require_finalize_; }
  /// Starts to watch which gradients arrive.
  void watch_arrivals() { std::fill(backward_stats_.begin(), backward_stats_.end(), -1); }
  /// Indices of parameters whose gradients have not arrived since.
  std::vector<std::size_t> missing() const;
  /// When the first and the last bucket had all their gradients, as time since
  /// prepare_for_backward; nothing if one has not.
  struct Readiness {
    std::chrono::nanoseconds first{}, last{};
  };
  std::optional<Readiness> readiness() const;

  /// Where `bucket` sits. During a hook, on its thread.
  BucketPlace place_of(const c10d::GradBucket& bucket) const;
  /// For every bucket, in the order of reduction, the indices of its parameters.
  std::vector<std::vector<std::size_t>> assignment() const;
  /// How many buckets the current backward has begun to reduce.
  std::size_t num_begun() const { return next_bucket_; }
  /// Bytes of every bucket.
  std::vector<std::int64_t> bucket_bytes() const;

  /// Where the gradient of parameter `index` lies in its bucket; undefined if it is sparse.
  const at::Tensor& view_of(std::size_t index) const;
  /// Whether the gradients of both lie in one bucket.
  bool are_together(std::size_t index, std::size_t other) const {
    return variable_locators_[index].bucket_index == variable_locators_[other].bucket_index;
  }
  /// How many tensors see the memory of the bucket of parameter `index`: the reducer's and the
  /// gradients of its parameters.
  std::size_t num_owners(std::size_t index) const;
  /// Gives the bucket of parameter `index` other memory with the same contents. Gradients that are
  /// pieces of it move with it.
  void move_bucket_of(std::size_t index);
  /// Gives buckets whose reduction has not ended other memory, where a backward was given up: the
  /// reduction may write to the old one yet. Gradients that are pieces of them are let go of.
  void leave_buckets_in_flight();

  /// What the next backward divides sums by, where no hook does.
  void set_divisor(int divisor) { div_factor_ = divisor; }
  /// Forgets how often each gradient arrived in backwards without synchronisation, so that the
  /// first synchronised one of a static graph counts alone.
  void restart_hook_counts();
  /// Whether a gradient has arrived since, in a static graph that learns.
  bool has_counted_hooks() const;
  /// Learns from `used`, how many ranks used each parameter, what a static graph shows in its first
  /// synchronised backward: for a rank that had no batch then. Each gradient arrives once.
  void learn_static_graph(const at::Tensor& used);
  /// Parameters that a static graph never uses have no place in the order of arrival; puts them at
  /// its end, so that buckets can be rebuilt.
  void complete_arrival_order();

  /// Which parameters have got gradients since the last synchronised backward, 0 or 1 each. Only
  /// kept with find_unused_parameters, and before the end of the backward.
  at::Tensor used_map() const { return local_used_map_.clone(); }

 private:
  void move(Bucket& bucket);
};

/// Sizes of buckets in bytes, as torch's options mean them.
struct BucketLimits {
  std::int64_t cap = 0;
  std::int64_t first_cap = 0;
  std::vector<std::int64_t> list;
};
BucketLimits bucket_limits(const Options& options);

/// Cuts the parameters into buckets and makes the reducer.
std::shared_ptr<BucketReducer> make_reducer(const std::vector<NamedParameter>& parameters,
                                            const comm::Group& group, const Options& options);

}  // namespace tessera::data_parallel
