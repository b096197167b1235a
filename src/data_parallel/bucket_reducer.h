// src/data_parallel/bucket_reducer.h — takes gradients over as backward computes them, and has each
// bucket reduced when it is full.
//
// Note [An iteration of the reducer]
// Between iterations gradients stay with their parameters (kIdle). `expect` says that the next
// backward reduces: gradients are then copied to their buckets as they arrive (kReducing), each
// bucket is reduced when it and those before it are full, and when all have begun (kBegun), the end
// of backward waits for them and hands the averages out. The first such backward of a static graph
// only counts how often each gradient arrives (kLearning); all buckets are reduced at its end.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "data_parallel/gradient_buckets.h"

namespace torch::distributed::autograd {
class DistAutogradContext;
}

namespace tessera::data_parallel {

class ReplicaLog;

class BucketReducer {
 public:
  /// What the owner does for the reducer, on the thread of backward.
  struct Calls {
    /// Starts the reduction of bucket `index`, whose gradients are in `buffer`. A future of the
    /// averages.
    std::function<FuturePtr(std::size_t index, at::Tensor& buffer)> reduce;
    /// A gradient has arrived, before anything is done with it.
    std::function<void()> on_arrival;
  };

  /// `parameters`, `options` and `log` outlive this. Hooks sit on the parameters while it lives.
  BucketReducer(const std::vector<NamedParameter>& parameters, const Options& options,
                const comm::Group& group, ReplicaLog& log, Calls calls, bool is_alone);
  ~BucketReducer() { remove_hooks(); }
  BucketReducer(const BucketReducer&) = delete;
  BucketReducer& operator=(const BucketReducer&) = delete;

  /// The next backward reduces. With find_unused_parameters, parameters that none of `outputs`
  /// depends on count as arrived. Gradients are divided by `divisor` as they are copied, if given.
  void expect(const std::vector<at::Tensor>& outputs, std::optional<double> divisor);
  /// At the end of a static graph's first backward: reduces everything. Not if no gradient came.
  void finish_learning();
  /// One iteration of a rank without a batch: its gradients are zeros. Collective.
  void shadow();
  /// Puts buckets into the order in which gradients arrive, once that is known; true if it did.
  /// Collective then.
  bool rebuild();
  /// Forgets a backward that was cut short, and the order of the buckets.
  void reset();

  /// The next backward is a static graph's first.
  bool is_learning() const { return options_.static_graph && !has_learned_; }
  /// Some gradients of the current backward have been taken over, but not handed out.
  bool is_unfinished() const {
    return pass_.phase == Phase::kReducing || pass_.phase == Phase::kBegun;
  }
  /// Indices of parameters whose gradients have not arrived in it.
  std::vector<std::size_t> missing() const;
  /// How many buckets it has begun to reduce, and how many of them somebody needed.
  std::size_t num_begun() const { return pass_.num_begun; }
  std::size_t num_reduced() const { return pass_.num_reduced; }
  /// Parameters in the order in which their gradients came.
  const std::vector<std::size_t>& order() const { return pass_.order; }
  /// Parameters that the current graph does not use on this rank.
  const std::vector<std::size_t>& unused() const { return unused_; }
  /// Whether it has been the same parameters in every backward.
  bool is_graph_static() const { return is_graph_static_; }
  bool has_rebuilt() const { return has_rebuilt_; }

  /// Which parameters have got gradients since the last synchronised backward, 0 or 1 each. Only
  /// kept where unused parameters are looked for, and before the end of the backward.
  at::Tensor used_here() const { return usage_.here.clone(); }
  /// On how many ranks the last backward used each parameter.
  at::Tensor used_by_ranks() const { return usage_.by_ranks; }

  GradientBuckets& buckets() { return buckets_; }
  const GradientBuckets& buckets() const { return buckets_; }
  void set_group(const comm::Group& group);
  /// A hook uses the gradients up: averages need not be handed out.
  void set_consumed() { are_consumed_ = true; }
  /// Waited for at the end of the next backward.
  void wait_also_for(const std::vector<FuturePtr>& futures);
  /// The rows of sparse gradients that can occur in the next backward, by parameter.
  void set_sparse_rows(std::map<std::string, at::Tensor> rows) { sparse_rows_ = std::move(rows); }
  /// Leaves gradients alone from now on.
  void remove_hooks();

 private:
  enum class Phase { kIdle, kLearning, kExpecting, kReducing, kBegun };
  /// One backward that reduces.
  struct Pass {
    Phase phase = Phase::kIdle;
    std::optional<double> divisor;
    std::vector<bool> has_arrived;  // by parameter
    std::vector<int> num_left;      // arrivals that a static graph's parameter waits for
    std::vector<std::size_t> order;
    std::size_t num_begun = 0;
    std::size_t num_reduced = 0;
    bool has_taken_unused = false;
  };
  /// Who uses which parameter. Ranks exchange it where a parameter may be used on some only.
  struct Usage {
    at::Tensor here;      // on the CPU
    at::Tensor by_ranks;  // where the group's tensors live
    c10::intrusive_ptr<c10d::Work> work;
    bool is_by_ranks = false;  // `here` holds the ranks' counts by now
  };
  using NodePtr =
      decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));
  struct Hook {
    NodePtr accumulator;
    std::uintptr_t key;
  };

  bool finds_unused() const { return options_.find_unused_parameters && !options_.static_graph; }
  bool can_rebuild() const {
    return !has_rebuilt_ && (options_.static_graph || !options_.find_unused_parameters);
  }
  void arrive(std::size_t index);
  void search_unused(const std::vector<at::Tensor>& outputs);
  /// Takes the gradient of a parameter into its bucket, and begins what can begin.
  void take(std::size_t index);
  void copy_in(std::size_t index);
  void take_sparse(std::size_t index);
  void copy_late(GradientBucket& bucket);
  void begin_full_buckets();
  bool is_skipped(const GradientBucket& bucket) const;
  void start_usage();
  bool is_used_anywhere(std::size_t index);
  void finish();
  void hand_out(GradientBucket& bucket);
  /// Calls `change` with the gradient of a parameter, which lies elsewhere under torch's
  /// distributed autograd. `change` says whether it did change it.
  void with_gradient(std::size_t index, const std::function<bool(at::Tensor&)>& change);
  [[noreturn]] void fail(const std::string& text) const;

  std::mutex mutex_;  // devices have a thread of backward each
  const std::vector<NamedParameter>& parameters_;
  const Options& options_;
  comm::Group group_;
  ReplicaLog& log_;
  Calls calls_;
  GradientBuckets buckets_;
  std::vector<Hook> hooks_;
  Pass pass_;
  Usage usage_;
  std::vector<std::size_t> unused_;
  std::vector<int> num_arrivals_;  // of a static graph's parameters, in every backward
  std::vector<std::size_t> arrival_order_;
  std::vector<FuturePtr> others_;
  std::map<std::string, at::Tensor> sparse_rows_;
  std::shared_ptr<torch::distributed::autograd::DistAutogradContext> context_;
  bool has_learned_ = false;
  bool has_rebuilt_ = false;
  bool is_graph_static_ = true;
  bool are_consumed_ = false;
};

}  // namespace tessera::data_parallel
