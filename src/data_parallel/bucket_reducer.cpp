#include "data_parallel/bucket_reducer.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <ATen/ScalarOps.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include "data_parallel/hook_base.h"
#include "data_parallel/replica_log.h"
#include "tessera/core/check.h"

// Profiles show the reducer's work under torch's names.
#define TESSERA_PROFILED(name) RECORD_FUNCTION(name, std::vector<c10::IValue>())

namespace tessera::data_parallel {

using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::distributed::autograd::ThreadLocalDistAutogradContext;

BucketReducer::BucketReducer(const std::vector<NamedParameter>& parameters, const Options& options,
                             const comm::Group& group, ReplicaLog& log, Calls calls, bool is_alone)
    : parameters_(parameters),
      options_(options),
      group_(group),
      log_(log),
      calls_(std::move(calls)),
      buckets_(parameters, options, group, /*has_memory=*/!is_alone),
      num_arrivals_(parameters.size(), 0) {
  const auto size = static_cast<std::int64_t>(parameters.size());
  usage_.here = at::zeros({size}, at::kInt);
  usage_.by_ranks =
      at::zeros({size}, at::TensorOptions(at::kInt).device(parameters.front().tensor.device()));
  // A hook per gradient that has nothing to do would be most of what one rank alone pays.
  if (is_alone) return;
  for (std::size_t index = 0; index < parameters.size(); ++index) {
    NodePtr accumulator = torch::autograd::impl::grad_accumulator(parameters[index].tensor);
    auto hook = std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this, index](const variable_list& outputs, const variable_list&) {
          arrive(index);
          return outputs;
        },
        [](torch::dynamo::autograd::CompiledNodeArgs&) {
          TORCH_CHECK(false,
                      "Compiled autograd is not compatible with C++ DDP Reducer: it runs no "
                      "hooks of C++.");
        });
    const std::uintptr_t key = accumulator->add_post_hook(std::move(hook));
    hooks_.push_back({std::move(accumulator), key});
  }
}

void BucketReducer::remove_hooks() {
  for (const Hook& hook : hooks_) hook.accumulator->del_post_hook(hook.key);
  hooks_.clear();
}

void BucketReducer::fail(const std::string& text) const {
  log_.set_error(text);
  TORCH_CHECK(false, text);
}

void BucketReducer::set_group(const comm::Group& group) {
  group_ = group;
  buckets_.set_group(group);
}

void BucketReducer::wait_also_for(const std::vector<FuturePtr>& futures) {
  others_.insert(others_.end(), futures.begin(), futures.end());
}

void BucketReducer::with_gradient(std::size_t index,
                                  const std::function<bool(at::Tensor&)>& change) {
  const at::Tensor& parameter = parameters_[index].tensor;
  if (context_) {
    context_->runGradCallbackForVariable(parameter, change);
  } else {
    change(parameter.mutable_grad());
  }
}

// ---- a backward is expected ----

void BucketReducer::expect(const std::vector<at::Tensor>& outputs, std::optional<double> divisor) {
  const std::lock_guard lock(mutex_);
  log_.record(ReplicaLog::Event::kBackwardComputeStart);
  pass_ = {};
  pass_.divisor = divisor;
  pass_.has_arrived.assign(parameters_.size(), false);
  pass_.phase = is_learning() ? Phase::kLearning : Phase::kExpecting;
  if (is_learning()) std::fill(num_arrivals_.begin(), num_arrivals_.end(), 0);
  pass_.num_left = num_arrivals_;
  for (GradientBucket& bucket : buckets_) {
    bucket.num_missing = bucket.parameters.size();
    bucket.late.clear();
    bucket.future.reset();
  }
  if (finds_unused()) search_unused(outputs);
}

void BucketReducer::search_unused(const std::vector<at::Tensor>& outputs) {
  TESSERA_PROFILED("torch.distributed.ddp.reducer::search_unused_parameters");
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> queue;
  for (const at::Tensor& output : outputs) {
    if (output.grad_fn()) queue.push_back(output.grad_fn().get());
  }
  while (!queue.empty()) {
    const Node* node = queue.back();
    queue.pop_back();
    for (const auto& edge : node->next_edges()) {
      const Node* next = edge.function.get();
      if (next != nullptr && seen.insert(next).second) queue.push_back(next);
    }
  }
  const auto before = std::exchange(unused_, {});
  for (std::size_t index = 0; index < hooks_.size(); ++index) {
    if (seen.count(hooks_[index].accumulator.get()) == 0) unused_.push_back(index);
  }
  if (unused_.empty()) {
    TORCH_WARN_ONCE(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
        "parameters in the forward pass. The search costs a walk through the graph in every "
        "iteration; leave the flag out if all iterations use all parameters.");
  }
  if (log_.num_iterations() > 1 && before != unused_) is_graph_static_ = false;
}

// ---- gradients arrive ----

void BucketReducer::arrive(std::size_t index) {
  const std::lock_guard lock(mutex_);
  context_ = ThreadLocalDistAutogradContext::getContextPtr();
  calls_.on_arrival();
  if (finds_unused() || is_learning()) {
    // Also in backwards that do not reduce. A hook may come without a gradient, where an output has
    // been ignored.
    with_gradient(index, [&](at::Tensor& gradient) {
      if (gradient.defined()) usage_.here.mutable_data_ptr<int>()[index] = 1;
      return false;
    });
  }
  if (pass_.phase == Phase::kLearning) ++num_arrivals_[index];
  if (pass_.phase == Phase::kLearning || pass_.phase == Phase::kIdle) return;

  pass_.order.push_back(index);
  if (!std::exchange(pass_.has_taken_unused, true)) {
    for (const std::size_t unused : unused_) take(unused);
  }
  if (options_.static_graph) {
    if (pass_.num_left[index] == 0) {
      fail(
          "Your training graph has changed in this iteration, e.g., one parameter is unused in "
          "first iteration, but then got used in the second iteration. this is not compatible with "
          "static_graph set to True.");
    }
    if (--pass_.num_left[index] > 0) return;
  }
  if (can_rebuild()) arrival_order_.push_back(index);
  take(index);
}

void BucketReducer::take(std::size_t index) {
  if (pass_.has_arrived[index]) {
    fail(
        "Expected to mark a variable ready only once. The gradient of '" + parameters_[index].name +
        "' came again in the same iteration: Parameter at index " + std::to_string(index) +
        " with name " + parameters_[index].name +
        " has been marked as ready twice. A parameter was used outside of `forward`, or in several "
        "reentrant backwards, such as checkpoints that share it" +
        (unused_.empty() ? std::string()
                         : ", or by a graph that was made after unused parameters had been looked "
                           "for") +
        ". If every iteration uses the same parameters equally often, static_graph=True can count "
        "them.");
  }
  pass_.has_arrived[index] = true;
  pass_.phase = Phase::kReducing;
  copy_in(index);
  GradientBucket& bucket = buckets_.bucket_of(index);
  if (--bucket.num_missing > 0) return;
  copy_late(bucket);
  begin_full_buckets();
  if (pass_.num_begun < buckets_.size()) return;
  if (finds_unused()) start_usage();
  pass_.phase = Phase::kBegun;
  Engine::get_default_engine().queue_callback([this] {
    const std::lock_guard lock(mutex_);
    log_.record(ReplicaLog::Event::kBackwardComputeEnd);
    finish();
  });
}

void BucketReducer::copy_in(std::size_t index) {
  GradientBucket& bucket = buckets_.bucket_of(index);
  if (bucket.is_sparse) return take_sparse(index);
  at::Tensor& view = bucket.views[buckets_.slot_of(index)];
  with_gradient(index, [&](at::Tensor& gradient) {
    if (!gradient.defined()) {
      view.zero_();
      return false;
    }
    if (!gradient.options().type_equal(view.options())) {
      fail("Expected " + view.toString() + ", got " + gradient.toString());
    }
    if (gradient.is_alias_of(view)) {
      if (pass_.divisor && !options_.batched_grad_copy) view.div_(*pass_.divisor);
      return false;
    }
    if (options_.batched_grad_copy && !gradient.requires_grad()) {
      bucket.late.push_back(buckets_.slot_of(index));
      return false;
    }
    if (!pass_.divisor || options_.batched_grad_copy) {
      TESSERA_PROFILED("torch::distributed::reducer::copy_");
      view.copy_(gradient);
    } else {
      TESSERA_PROFILED("torch::distributed::reducer::mul_out");
      const at::Tensor share = at::native::wrapped_scalar_tensor(1 / *pass_.divisor);
      if (gradient.requires_grad()) {
        view.copy_(at::mul(gradient, share));  // what is made for second derivatives stays local
      } else {
        at::mul_out(view, gradient, share);
      }
    }
    if (options_.gradient_as_bucket_view) gradient = view;
    return options_.gradient_as_bucket_view;
  });
}

void BucketReducer::copy_late(GradientBucket& bucket) {
  if (!options_.batched_grad_copy || bucket.is_sparse) return;
  std::vector<at::Tensor> views;
  std::vector<at::Tensor> gradients;
  for (const std::size_t slot : bucket.late) {
    views.push_back(bucket.views[slot]);
    with_gradient(bucket.parameters[slot], [&](at::Tensor& gradient) {
      gradients.push_back(gradient);
      if (options_.gradient_as_bucket_view) gradient = bucket.views[slot];
      return options_.gradient_as_bucket_view;
    });
  }
  if (!views.empty()) at::_foreach_copy_(views, gradients);
  if (pass_.divisor) bucket.buffer.div_(*pass_.divisor);
}

void BucketReducer::take_sparse(std::size_t index) {
  GradientBucket& bucket = buckets_.bucket_of(index);
  with_gradient(index, [&](at::Tensor& gradient) {
    const std::string& name = parameters_[index].name;
    if (!gradient.defined()) fail("Expected sparse gradient to be defined: '" + name + "'.");
    if (!gradient.is_sparse()) fail("Expected variable to have sparse gradient: '" + name + "'.");
    if (!sparse_rows_.empty() && sparse_rows_.count(name) == 0) {
      fail("param: " + name + " not found in sparse metadata");
    }
    bucket.buffer = gradient;
    if (pass_.divisor) bucket.buffer.div_(*pass_.divisor);
    return true;
  });
}

void BucketReducer::begin_full_buckets() {
  for (; pass_.num_begun < buckets_.size(); ++pass_.num_begun) {
    GradientBucket& bucket = buckets_[pass_.num_begun];
    if (bucket.num_missing > 0) return;
    if (pass_.num_begun == 0) log_.record(ReplicaLog::Event::kBackwardCommStart);
    if (is_skipped(bucket)) continue;
    bucket.future = calls_.reduce(pass_.num_begun, bucket.buffer);
    ++pass_.num_reduced;
  }
}

bool BucketReducer::is_skipped(const GradientBucket& bucket) const {
  return options_.skip_all_reduce_unused_params &&
         std::all_of(bucket.parameters.begin(), bucket.parameters.end(), [&](std::size_t index) {
           return std::binary_search(unused_.begin(), unused_.end(), index);
         });
}

// ---- who uses what ----

void BucketReducer::start_usage() {
  // On a GPU the copy may be late, and `here` is cleared before: from memory of its own.
  usage_.by_ranks.copy_(usage_.by_ranks.is_cpu() ? usage_.here : usage_.here.pin_memory(),
                        /*non_blocking=*/true);
  std::vector<at::Tensor> tensors{usage_.by_ranks};
  usage_.work = group_.process_group()->allreduce(tensors);
}

bool BucketReducer::is_used_anywhere(std::size_t index) {
  const int* here = usage_.here.const_data_ptr<int>();
  // What is used here is used somewhere; only otherwise the ranks' answers are waited for.
  if (here[index] != 0 || usage_.is_by_ranks) return here[index] != 0;
  usage_.work->wait();
  usage_.here.copy_(usage_.by_ranks);
  usage_.is_by_ranks = true;
  return here[index] != 0;
}

// ---- the end of a backward ----

void BucketReducer::finish_learning() {
  const std::lock_guard lock(mutex_);
  // A gradient of inputs alone, as torch::autograd::grad computes it, is no iteration.
  if (pass_.phase != Phase::kLearning || std::all_of(num_arrivals_.begin(), num_arrivals_.end(),
                                                     [](int count) { return count == 0; })) {
    return;
  }
  log_.record(ReplicaLog::Event::kBackwardComputeEnd);
  start_usage();
  unused_.clear();
  pass_.phase = Phase::kReducing;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (num_arrivals_[index] == 0) unused_.push_back(index);
    copy_in(index);
  }
  has_learned_ = true;
  log_.record(ReplicaLog::Event::kBackwardCommStart);
  for (GradientBucket& bucket : buckets_) {
    copy_late(bucket);
    bucket.future = calls_.reduce(pass_.num_begun++, bucket.buffer);
  }
  finish();
}

void BucketReducer::finish() {
  pass_.phase = Phase::kIdle;
  for (GradientBucket& bucket : buckets_) {
    if (!bucket.future) continue;
    bucket.future->wait();
    const at::Tensor result = tensor_in(bucket.future->value());
    if (bucket.is_sparse) {
      bucket.buffer.copy_(result);
    } else {
      buckets_.set_results(bucket, result);
      hand_out(bucket);
    }
  }
  for (const FuturePtr& future : std::exchange(others_, {})) future->waitAndThrow();
  if (usage_.work && !usage_.is_by_ranks) usage_.work->wait();
  usage_.work.reset();
  if (finds_unused()) {
    usage_.here.zero_();
    usage_.is_by_ranks = false;
  }
  sparse_rows_.clear();
  log_.record(ReplicaLog::Event::kBackwardCommEnd);
}

void BucketReducer::hand_out(GradientBucket& bucket) {
  const bool may_be_unused = options_.static_graph || options_.find_unused_parameters;
  for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
    const std::size_t index = bucket.parameters[slot];
    const at::Tensor& view = bucket.views[slot];
    const at::Tensor& result = bucket.results[slot];
    if (options_.gradient_as_bucket_view && !view.is_alias_of(result)) view.copy_(result);
    // What nobody uses keeps the gradient it has.
    const bool is_unused = may_be_unused && !is_used_anywhere(index);
    if (are_consumed_ || is_unused) continue;
    with_gradient(index, [&](at::Tensor& gradient) {
      if (options_.gradient_as_bucket_view) {
        if (!gradient.defined()) gradient = view;
        if (!gradient.is_alias_of(view)) {
          fail("The gradient of '" + parameters_[index].name +
               "' is not the expected DDP bucket view with gradient_as_bucket_view=True. Was it "
               "replaced during backward, by another hook on the parameter?");
        }
        return true;
      }
      TESSERA_PROFILED("torch.distributed.ddp.reducer::copy_bucket_to_grad");
      if (gradient.defined()) {
        gradient.copy_(result);
      } else {
        gradient = torch::autograd::utils::clone_obey_contract(result, parameters_[index].tensor);
      }
      return true;
    });
  }
}

std::vector<std::size_t> BucketReducer::missing() const {
  std::vector<std::size_t> result;
  for (std::size_t index = 0; index < pass_.has_arrived.size(); ++index) {
    if (!pass_.has_arrived[index]) result.push_back(index);
  }
  return result;
}

// ---- between backwards ----

void BucketReducer::shadow() {
  // Active ranks learn which parameters anybody has used: after the buckets, or before them where a
  // static graph is seen for the first time.
  const auto add_nothing_to_usage = [&] {
    usage_.by_ranks.zero_();
    std::vector<at::Tensor> tensors{usage_.by_ranks};
    group_.process_group()->allreduce(tensors)->wait();
  };
  const bool is_first = is_learning();
  if (is_first) {
    add_nothing_to_usage();
    has_learned_ = true;
    usage_.here.copy_(usage_.by_ranks);
    usage_.is_by_ranks = true;
    unused_.clear();
    for (std::size_t index = 0; index < parameters_.size(); ++index) {
      num_arrivals_[index] = is_used_anywhere(index) ? 1 : 0;
      if (num_arrivals_[index] == 0) unused_.push_back(index);
    }
  }
  std::vector<FuturePtr> futures;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    at::Tensor zeros = buckets_.zeros_like(buckets_[i]);
    futures.push_back(calls_.reduce(i, zeros));
  }
  for (const FuturePtr& future : futures) future->waitAndThrow();
  if (finds_unused()) add_nothing_to_usage();
  // The first iteration of a static graph says nothing about the order of gradients; active ranks
  // rebuild their buckets after the second.
  if (!is_first && can_rebuild() && arrival_order_.empty()) {
    arrival_order_.resize(parameters_.size());
    std::iota(arrival_order_.begin(), arrival_order_.end(), 0);
  }
}

bool BucketReducer::rebuild() {
  const std::lock_guard lock(mutex_);
  if (!can_rebuild() || arrival_order_.empty()) return false;
  // What a static graph never uses has no place in the order.
  std::vector<bool> has_place(parameters_.size(), false);
  for (const std::size_t index : arrival_order_) has_place[index] = true;
  for (std::size_t index = 0; index < parameters_.size(); ++index) {
    if (!has_place[index]) arrival_order_.push_back(index);
  }
  has_rebuilt_ = true;
  buckets_.lay_out(
      cut_as_arrived(parameters_, options_, std::exchange(arrival_order_, {}), group_));
  return true;
}

void BucketReducer::reset() {
  const std::lock_guard lock(mutex_);
  buckets_.leave_those_in_flight();
  pass_.phase = Phase::kIdle;
  has_rebuilt_ = false;
  arrival_order_.clear();
  others_.clear();
  if (finds_unused()) {
    usage_.here.zero_();
    usage_.is_by_ranks = false;
  }
}

}  // namespace tessera::data_parallel
