#include "data_parallel/bucket_reducer.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>

#include <ATen/ops/empty_like.h>
#include <torch/version.h>

#include "tessera/core/check.h"

namespace tessera::data_parallel {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

std::int64_t bytes_of(double mebibytes) { return static_cast<std::int64_t>(mebibytes * kMiB); }

}  // namespace

std::vector<std::size_t> BucketReducer::missing() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < backward_stats_.size(); ++i) {
    if (backward_stats_[i] < 0) result.push_back(i);
  }
  return result;
}

std::optional<BucketReducer::Readiness> BucketReducer::readiness() const {
  if (buckets_.empty()) return std::nullopt;
  const auto last_of = [&](const Bucket& bucket) {
    std::int64_t last = 0;
    for (const std::size_t index : bucket.variable_indices) {
      last = std::max(last, backward_stats_[index]);
    }
    return std::chrono::nanoseconds(last);
  };
  if (std::any_of(backward_stats_.begin(), backward_stats_.end(),
                  [](std::int64_t moment) { return moment < 0; })) {
    return std::nullopt;
  }
  Readiness result{last_of(buckets_.front()), {}};
  for (const Bucket& bucket : buckets_) result.last = std::max(result.last, last_of(bucket));
  return result;
}

BucketPlace BucketReducer::place_of(const c10d::GradBucket& bucket) const {
  // The first iteration of a static graph numbers every bucket 0: what a bucket is about is told by
  // its parameters.
  const auto parameters = bucket.getParameters();
  const auto holds = [&](const Bucket& candidate) {
    return candidate.variables.size() == parameters.size() &&
           candidate.variables[0].is_same(parameters[0]);
  };
  std::size_t index = bucket.getIndex();
  if (index >= buckets_.size() || !holds(buckets_[index])) {
    for (index = 0; index < buckets_.size() && !holds(buckets_[index]); ++index) {
    }
    TESSERA_INTERNAL_ASSERT(index < buckets_.size(), "a bucket of unknown parameters was reduced");
  }
  return {index, index + 1 == buckets_.size(), buckets_[index].variable_indices};
}

std::vector<std::vector<std::size_t>> BucketReducer::assignment() const {
  std::vector<std::vector<std::size_t>> result;
  result.reserve(buckets_.size());
  for (const Bucket& bucket : buckets_) result.push_back(bucket.variable_indices);
  return result;
}

std::vector<std::int64_t> BucketReducer::bucket_bytes() const {
  std::vector<std::int64_t> result;
  for (const Bucket& bucket : buckets_) {
    std::int64_t bytes = 0;
    for (const at::Tensor& variable : bucket.variables) {
      bytes += static_cast<std::int64_t>(variable.nbytes());
    }
    result.push_back(bytes);
  }
  return result;
}

const at::Tensor& BucketReducer::view_of(std::size_t index) const {
  static const at::Tensor none;
  const VariableLocator& place = variable_locators_[index];
  const Bucket& bucket = buckets_[place.bucket_index];
  return bucket.expect_sparse_gradient ? none : bucket.bucket_views_in[place.intra_bucket_index];
}

std::size_t BucketReducer::num_owners(std::size_t index) const {
  const Bucket& bucket = buckets_[variable_locators_[index].bucket_index];
  std::size_t count = 1;  // the bucket itself
  for (std::size_t i = 0; i < bucket.variables.size(); ++i) {
    const at::Tensor& in = bucket.bucket_views_in[i];
    const at::Tensor& out = bucket.bucket_views_out[i];
    const at::Tensor& gradient = bucket.variables[i].grad();
    ++count;
    if (!out.is_same(in) && out.is_alias_of(in)) ++count;
    if (gradient.defined() && !gradient.is_same(in) && !gradient.is_same(out) &&
        gradient.is_alias_of(in)) {
      ++count;
    }
  }
  return count;
}

void BucketReducer::move_bucket_of(std::size_t index) {
  const std::lock_guard lock(mutex_);
  move(buckets_[variable_locators_[index].bucket_index]);
}

void BucketReducer::leave_buckets_in_flight() {
  const std::lock_guard lock(mutex_);
  for (Bucket& bucket : buckets_) {
    const bool is_in_flight = bucket.future_work && !bucket.future_work->completed();
    if (!is_in_flight || bucket.expect_sparse_gradient) continue;
    for (const at::Tensor& variable : bucket.variables) {
      at::Tensor& gradient = variable.mutable_grad();
      if (gradient.defined() && gradient.is_alias_of(bucket.gradients)) gradient.reset();
    }
    move(bucket);
  }
}

void BucketReducer::move(Bucket& bucket) {
  const at::Tensor old = bucket.gradients;
  const auto backend = process_group_->getBackend(old.device().type());
  bucket.gradients = backend->supportsTensorAlloc(old.device().index())
                         ? backend->allocateTensor(old.numel(), old.options())
                         : at::empty_like(old);
  bucket.gradients.copy_(old);
  bucket.bucket_views_in.clear();
  bucket.bucket_views_out.clear();
  initialize_bucket_views(bucket);
}

void BucketReducer::restart_hook_counts() {
  for (auto& [index, count] : numGradHooksTriggeredMap_) count = 0;
}

bool BucketReducer::has_counted_hooks() const {
  return std::any_of(numGradHooksTriggeredMap_.begin(), numGradHooksTriggeredMap_.end(),
                     [](const auto& entry) { return entry.second > 0; });
}

void BucketReducer::learn_static_graph(const at::Tensor& used) {
  const at::Tensor counts = used.cpu().to(at::kLong).contiguous();
  const auto* count = counts.const_data_ptr<std::int64_t>();
  unused_parameters_.clear();
  for (std::size_t i = 0; i < params_.size(); ++i) {
    numGradHooksTriggeredMap_[i] = count[i] > 0 ? 1 : 0;
    if (count[i] == 0) unused_parameters_.push_back(i);
  }
  local_used_map_.copy_(counts);
  local_used_map_reduced_ = true;
  num_bwd_calls_ = std::max(num_bwd_calls_, 1L);  // the next is not the first
}

void BucketReducer::complete_arrival_order() {
  if (!static_graph_ || has_rebuilt_bucket_ || rebuilt_param_indices_.empty()) return;
  std::vector<bool> has_arrived(params_.size(), false);
  for (const std::int64_t index : rebuilt_param_indices_) has_arrived[index] = true;
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!has_arrived[i]) push_rebuilt_params(i);
  }
}

BucketLimits bucket_limits(const Options& options) {
  BucketLimits limits;
  if (!options.bucket_cap_mb_list.empty()) {
    for (const double size : options.bucket_cap_mb_list) limits.list.push_back(bytes_of(size));
    limits.cap = *std::max_element(limits.list.begin(), limits.list.end());
    limits.first_cap = limits.cap;
  } else if (options.bucket_cap_mb) {
    limits.cap = bytes_of(*options.bucket_cap_mb);
    limits.first_cap = limits.cap;
  } else {
    limits.cap = c10d::kDefaultBucketBytesCap;
    limits.first_cap = c10d::kDefaultFirstBucketBytes;
  }
  return limits;
}

namespace {

/// LibTorch's Reducer asks the group's default engine for the memory of buckets, whatever the
/// device of the parameters: NCCL takes a CPU's index for that of a GPU. So it sees the engine of
/// theirs alone.
c10::intrusive_ptr<c10d::ProcessGroup> group_of_device(const comm::Group& group,
                                                       at::DeviceType device) {
  const auto& whole = group.process_group();
  const auto engine = whole->getBackend(device);
  if (whole->getDefaultBackend() == engine) return whole;
  auto part = c10::make_intrusive<c10d::ProcessGroup>(group.store(), group.rank(), group.size());
  constexpr auto kType = c10d::ProcessGroup::BackendType::CUSTOM;
  part->setBackend(device, kType, engine);
  part->setDefaultBackend(kType);
  part->setGroupName(whole->getGroupName());
  return part;
}

}  // namespace

std::shared_ptr<BucketReducer> make_reducer(const std::vector<NamedParameter>& parameters,
                                            const comm::Group& group, const Options& options) {
  std::vector<at::Tensor> tensors;
  std::vector<bool> is_sparse;
  std::unordered_map<std::size_t, std::string> names;
  for (const NamedParameter& parameter : parameters) {
    names[tensors.size()] = parameter.name;
    tensors.push_back(parameter.tensor);
    is_sparse.push_back(parameter.is_sparse);
  }

  const auto process_group = group_of_device(group, tensors.front().device().type());
  const BucketLimits limits = bucket_limits(options);
  std::vector<std::size_t> sizes;
  if (!limits.list.empty()) {
    sizes.assign(limits.list.begin(), limits.list.end());
  } else if (options.static_graph || !options.find_unused_parameters) {
    // One bucket until the order in which gradients arrive is known: other collectives in the
    // backward graph then cannot come between buckets in another order on another rank.
    sizes.push_back(std::numeric_limits<std::size_t>::max());
  } else {
    sizes = {static_cast<std::size_t>(limits.first_cap), static_cast<std::size_t>(limits.cap)};
  }
  auto indices =
      std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, sizes, is_sparse, {}, {}));
  std::reverse(indices.begin(), indices.end());  // gradients arrive last layer first

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return std::make_shared<BucketReducer>(
      std::move(tensors), std::move(indices), process_group, std::move(is_sparse), limits.cap,
      options.find_unused_parameters, options.gradient_as_bucket_view, std::move(names),
      limits.first_cap, options.skip_all_reduce_unused_params, /*use_python_reducer=*/false,
      limits.list, options.batched_grad_copy);
#else
  TESSERA_CHECK_VALUE(!options.batched_grad_copy,
                      "data_parallel: batched_grad_copy needs LibTorch 2.13, this is ",
                      TORCH_VERSION, ".");
  return std::make_shared<BucketReducer>(
      std::move(tensors), std::move(indices), process_group, std::move(is_sparse), limits.cap,
      options.find_unused_parameters, options.gradient_as_bucket_view, std::move(names),
      limits.first_cap, options.skip_all_reduce_unused_params, /*use_python_reducer=*/false,
      limits.list);
#endif
}

}  // namespace tessera::data_parallel
