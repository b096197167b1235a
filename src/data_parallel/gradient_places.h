// src/data_parallel/gradient_places.h — lets backward compute gradients where they belong.
//
// A gradient is a tensor that some node of the graph makes; the reducer then copies it into its
// bucket. While a backward is watched, memory for the tensor that is expected to become the
// gradient of a parameter is taken from the parameter's place in its bucket, and there is nothing
// left to copy. What is expected is learned from the iterations before, and may be wrong: whatever
// is written to a bucket is written only after everybody else has let go of that memory. Why this
// is safe, and what it does not cover: docs/decisions/0011-gradients-in-place.md.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/variable.h>

#include "data_parallel/gradient_buckets.h"

namespace tessera::data_parallel {

/// A place in a bucket while a tensor that is not the reducer's lives there.
struct Lease {
  Lease(c10::Storage bucket, void* place) : memory(std::move(bucket)), data(place) {}

  c10::Storage memory;  // stays as long as the tensor does
  void* const data;
  std::atomic<bool> has_ended{false};
};

/// The places of all parameters of one reducer. Its methods are called where the reducer's are: by
/// one backward at a time. The memory it gives out may be let go of by any thread.
class GradientPlaces {
 public:
  /// Smaller gradients are copied: that costs less than asking.
  static constexpr std::size_t kLeastBytes = 16384;

  /// Before the reducer is made: gradients are looked at before it looks at them.
  explicit GradientPlaces(const std::vector<NamedParameter>& parameters);
  ~GradientPlaces();
  GradientPlaces(const GradientPlaces&) = delete;
  GradientPlaces& operator=(const GradientPlaces&) = delete;

  void attach(GradientBuckets* buckets) { buckets_ = buckets; }

  /// A backward begins that will give every parameter a gradient and reduce it.
  void open();
  /// It has ended, or was given up.
  void close();

  /// Gradients that were computed in their place so far.
  std::int64_t num_in_place() const noexcept { return num_in_place_; }
  /// Buckets that had to move because a tensor held on to a place in them.
  std::int64_t num_moved() const noexcept { return num_moved_; }

 private:
  friend class PlacingAllocator;
  class ArrivalHook;
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  /// One parameter.
  struct Place {
    at::Tensor parameter;
    std::size_t index = 0;  // the reducer's
    std::size_t bytes = 0;
    NodePtr accumulator;
    std::uintptr_t hook = 0;
    // Which of the tensors of this size, made by nodes that lead here, becomes the gradient; -1
    // while that is not known, -2 once it has proved useless to ask.
    int ordinal = -1;
    int num_failures = 0;
    // Of the current backward.
    bool has_arrived = true;
    int num_made = 0;
    std::vector<const void*> made;  // while the ordinal is being learned
    std::shared_ptr<Lease> lease;
  };

  /// A tensor of `place.bytes` bytes is made now, which may become the gradient. Gives its memory,
  /// or null if it should live elsewhere.
  std::shared_ptr<Lease> make(Place& place);
  std::shared_ptr<Lease> lease(Place& place);
  /// The gradient has come; the reducer sees it next.
  void arrive(Place& place, const torch::autograd::variable_list& inputs);
  static void learn(Place& place);
  static void fail(Place& place);
  /// Nobody but the engine sees the gradient.
  static bool is_only_here(const Place& place, const torch::autograd::variable_list& inputs);
  void move_bucket(const Place& place);

  GradientBuckets* buckets_ = nullptr;
  std::vector<Place> places_;  // hooks point into it
  bool is_open_ = false;
  std::int64_t num_in_place_ = 0;
  std::int64_t num_moved_ = 0;
};

}  // namespace tessera::data_parallel
