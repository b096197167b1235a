#include "data_parallel/gradient_buckets.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string_view>

#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "comm/backend.h"
#include "comm/engines.h"
#include "data_parallel/hook_base.h"
#include "tessera/comm/collectives.h"

namespace tessera::data_parallel {
namespace {

constexpr std::size_t kMiB = 1U << 20;
constexpr std::size_t kDefaultCap = 25 * kMiB;
constexpr std::size_t kDefaultFirstCap = kMiB;

std::size_t bytes_of(double mebibytes) { return static_cast<std::size_t>(mebibytes * kMiB); }

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "1";
}

/// In `order`, buckets of one type and device each; a sparse gradient is alone.
BucketCut cut(const std::vector<NamedParameter>& parameters, const std::vector<std::size_t>& order,
              const std::vector<std::size_t>& limits) {
  struct Open {
    at::Tensor like;
    std::vector<std::size_t> parameters;
    std::size_t bytes = 0;
    std::size_t num_closed = 0;
  };
  std::vector<Open> open;
  BucketCut result;
  for (const std::size_t index : order) {
    const at::Tensor& tensor = parameters[index].tensor;
    if (parameters[index].is_sparse) {
      result.push_back({index});
      continue;
    }
    auto bucket = std::find_if(open.begin(), open.end(), [&](const Open& other) {
      return other.like.scalar_type() == tensor.scalar_type() &&
             other.like.device() == tensor.device();
    });
    if (bucket == open.end()) bucket = open.insert(open.end(), Open{tensor, {}});
    bucket->parameters.push_back(index);
    bucket->bytes += tensor.nbytes();
    if (bucket->bytes < limits[std::min(bucket->num_closed, limits.size() - 1)]) continue;
    ++bucket->num_closed;
    bucket->bytes = 0;
    result.push_back(std::exchange(bucket->parameters, {}));
  }
  for (Open& bucket : open) {
    if (!bucket.parameters.empty()) result.push_back(std::move(bucket.parameters));
  }
  return result;
}

}  // namespace

bool uses_shared_memory(const comm::Group& group, c10::Device device) {
  const auto* engine = device.is_cpu() ? comm::engine_of(group) : nullptr;
  return engine != nullptr && engine->getBackendName() != "gloo";
}

BucketLimits bucket_limits(const Options& options) {
  BucketLimits limits;
  if (!options.bucket_cap_mb_list.empty()) {
    for (const double size : options.bucket_cap_mb_list) limits.sizes.push_back(bytes_of(size));
  } else if (options.bucket_cap_mb) {
    limits.sizes = {bytes_of(*options.bucket_cap_mb)};
  } else {
    limits.sizes = {kDefaultFirstCap, kDefaultCap};
  }
  limits.cap =
      static_cast<std::int64_t>(*std::max_element(limits.sizes.begin(), limits.sizes.end()));
  return limits;
}

BucketCut first_cut(const std::vector<NamedParameter>& parameters, const Options& options) {
  // One bucket until the order in which gradients arrive is known: other collectives in the
  // backward graph then cannot come between buckets in another order on another rank.
  const bool is_one = options.bucket_cap_mb_list.empty() &&
                      (options.static_graph || !options.find_unused_parameters);
  std::vector<std::size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), 0);
  BucketCut result = cut(parameters, order,
                         is_one ? std::vector<std::size_t>{std::numeric_limits<std::size_t>::max()}
                                : bucket_limits(options).sizes);
  std::sort(result.begin(), result.end(),
            [](const auto& a, const auto& b) { return a.front() < b.front(); });
  std::reverse(result.begin(), result.end());  // gradients arrive last layer first
  return result;
}

BucketCut cut_as_arrived(const std::vector<NamedParameter>& parameters, const Options& options,
                         std::vector<std::size_t> order, const comm::Group& group) {
  const bool is_last_small = is_set("DDP_SET_LAST_BUCKET_CAP");
  if (is_last_small) std::reverse(order.begin(), order.end());
  BucketCut mine = cut(parameters, order, bucket_limits(options).sizes);
  if (is_last_small) std::reverse(mine.begin(), mine.end());
  if (group.size() == 1) return mine;

  const auto from_rank_0 = [&](const std::vector<std::int64_t>& words) {
    at::Tensor sent = at::tensor(words, at::kLong).to(parameters.front().tensor.device());
    comm::broadcast_(sent, /*root=*/0, group);
    return sent.cpu();
  };
  std::vector<std::int64_t> indices;  // in the new order
  std::vector<std::int64_t> numbers;  // of the bucket of each
  for (std::size_t i = 0; i < mine.size(); ++i) {
    indices.insert(indices.end(), mine[i].begin(), mine[i].end());
    numbers.insert(numbers.end(), mine[i].size(), static_cast<std::int64_t>(i));
  }
  const at::Tensor agreed_indices = from_rank_0(indices);
  const at::Tensor agreed_numbers = from_rank_0(numbers);
  BucketCut result;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto bucket = static_cast<std::size_t>(agreed_numbers.const_data_ptr<std::int64_t>()[i]);
    if (bucket == result.size()) result.emplace_back();
    result[bucket].push_back(
        static_cast<std::size_t>(agreed_indices.const_data_ptr<std::int64_t>()[i]));
  }
  return result;
}

GradientBuckets::GradientBuckets(const std::vector<NamedParameter>& parameters,
                                 const Options& options, comm::Group group, bool has_memory)
    : parameters_(parameters),
      are_gradients_views_(options.gradient_as_bucket_view),
      has_memory_(has_memory),
      group_(std::move(group)) {
  lay_out(first_cut(parameters_, options));
}

void GradientBuckets::lay_out(BucketCut cut) {
  buckets_.clear();
  buckets_.resize(cut.size());
  places_.resize(parameters_.size());
  for (std::size_t i = 0; i < cut.size(); ++i) {
    GradientBucket& bucket = buckets_[i];
    bucket.parameters = std::move(cut[i]);
    const NamedParameter& first = parameters_[bucket.parameters.front()];
    bucket.is_sparse = first.is_sparse;
    std::int64_t size = 0;
    for (std::size_t slot = 0; slot < bucket.parameters.size(); ++slot) {
      places_[bucket.parameters[slot]] = {i, slot};
      size += parameters_[bucket.parameters[slot]].tensor.numel();
    }
    if (bucket.is_sparse || !has_memory_) continue;
    auto options = first.tensor.options().requires_grad(false);
    if (first.tensor.is_complex()) {  // as pairs of reals
      options = options.dtype(c10::toRealValueType(first.tensor.scalar_type()));
      size *= 2;
    }
    bucket.buffer = allocate(size, options);
    make_views(bucket);
  }
}

at::Tensor GradientBuckets::allocate(std::int64_t size, const at::TensorOptions& options) const {
  const char* wish = std::getenv("DDP_DISABLE_COMM_MEM");
  if (wish != nullptr ? std::string_view(wish) != "1"
                      : uses_shared_memory(group_, options.device())) {
    const auto engine = group_.process_group()->getBackend(options.device().type());
    if (engine->supportsTensorAlloc(options.device().index())) {
      return engine->allocateTensor(size, options);
    }
  }
  return at::empty({size}, options);
}

std::vector<at::Tensor> GradientBuckets::parameters_of(const GradientBucket& bucket) const {
  std::vector<at::Tensor> result;
  for (const std::size_t index : bucket.parameters) result.push_back(parameters_[index].tensor);
  return result;
}

void GradientBuckets::make_views(GradientBucket& bucket) {
  bucket.views = views_of(bucket.buffer, parameters_of(bucket));
  bucket.results = bucket.views;
  if (!are_gradients_views_) return;
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    at::Tensor& gradient = parameters_[bucket.parameters[slot]].tensor.mutable_grad();
    if (!gradient.defined() || gradient.is_alias_of(bucket.views[slot])) continue;
    bucket.views[slot].copy_(gradient);
    gradient = bucket.views[slot];
  }
}

void GradientBuckets::move(GradientBucket& bucket) {
  const at::Tensor old = bucket.buffer;
  bucket.buffer = allocate(old.numel(), old.options());
  bucket.buffer.copy_(old);
  make_views(bucket);
}

void GradientBuckets::leave_those_in_flight() {
  for (GradientBucket& bucket : buckets_) {
    if (!bucket.future || bucket.future->completed() || bucket.is_sparse) continue;
    for (const std::size_t index : bucket.parameters) {
      at::Tensor& gradient = parameters_[index].tensor.mutable_grad();
      if (gradient.defined() && gradient.is_alias_of(bucket.buffer)) gradient.reset();
    }
    move(bucket);
  }
}

void GradientBuckets::set_results(GradientBucket& bucket, const at::Tensor& flat) {
  const bool is_buffer = flat.is_alias_of(bucket.buffer) && flat.is_contiguous() &&
                         flat.numel() == bucket.buffer.numel() &&
                         flat.scalar_type() == bucket.buffer.scalar_type();
  bucket.results = is_buffer ? bucket.views : views_of(flat, parameters_of(bucket));
}

at::Tensor GradientBuckets::zeros_like(const GradientBucket& bucket) const {
  if (!bucket.is_sparse) return at::zeros_like(bucket.buffer);
  // Of embeddings: whole rows.
  const at::Tensor& parameter = parameters_[bucket.parameters.front()].tensor;
  const auto options = parameter.options().requires_grad(false);
  std::vector<std::int64_t> sizes = parameter.sizes().vec();
  sizes[0] = 0;
  return at::sparse_coo_tensor(at::zeros({1, 0}, options.dtype(at::kLong)),
                               at::zeros(sizes, options), parameter.sizes());
}

BucketCut GradientBuckets::cut() const {
  BucketCut result;
  for (const GradientBucket& bucket : buckets_) result.push_back(bucket.parameters);
  return result;
}

std::vector<std::int64_t> GradientBuckets::bytes() const {
  std::vector<std::int64_t> result;
  for (const GradientBucket& bucket : buckets_) {
    std::size_t bytes = 0;
    for (const std::size_t index : bucket.parameters) bytes += parameters_[index].tensor.nbytes();
    result.push_back(static_cast<std::int64_t>(bytes));
  }
  return result;
}

const at::Tensor& GradientBuckets::view_of(std::size_t parameter) const {
  static const at::Tensor none;
  const auto [bucket, slot] = places_[parameter];
  return buckets_[bucket].is_sparse ? none : buckets_[bucket].views[slot];
}

std::size_t GradientBuckets::num_owners(std::size_t parameter) const {
  const GradientBucket& bucket = buckets_[places_[parameter].first];
  std::size_t count = 1;  // the buffer itself
  for (std::size_t slot = 0; slot < bucket.views.size(); ++slot) {
    const at::Tensor& view = bucket.views[slot];
    const at::Tensor& result = bucket.results[slot];
    const at::Tensor& gradient = parameters_[bucket.parameters[slot]].tensor.grad();
    ++count;
    if (!result.is_same(view) && result.is_alias_of(view)) ++count;
    if (gradient.defined() && !gradient.is_same(view) && !gradient.is_same(result) &&
        gradient.is_alias_of(view)) {
      ++count;
    }
  }
  return count;
}

}  // namespace tessera::data_parallel
