#include <algorithm>
#include <numeric>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>

#include "jagged/composed.h"
#include "jagged/device.h"
#include "kernels/jagged.h"
#include "tessera/core/check.h"
#include "tessera/jagged/operators.h"

namespace tessera::jagged {
namespace {

// Ids below which another thread is not worth waking.
constexpr std::int64_t kGrainIds = 4096;

void check(const at::Tensor& lengths, const at::Tensor& values, const at::Tensor& weights,
           const BucketizeOptions& options) {
  detail::check_integers(lengths, "jagged.bucketize", "the lengths");
  detail::check_integers(values, "jagged.bucketize", "the ids");
  const std::size_t num_features = options.bags_per_feature.size();
  TESSERA_CHECK_VALUE(options.num_buckets > 0, "jagged.bucketize: there are ", options.num_buckets,
                      " buckets.");
  const std::int64_t num_bags = std::accumulate(options.bags_per_feature.begin(),
                                                options.bags_per_feature.end(), std::int64_t{0});
  TESSERA_CHECK_VALUE(num_bags == lengths.numel(), "jagged.bucketize: the features have ", num_bags,
                      " bags, but there are ", lengths.numel(), " lengths.");
  TESSERA_CHECK_VALUE(options.block_starts.empty() || options.block_starts.size() == num_features,
                      "jagged.bucketize: there are block starts for ", options.block_starts.size(),
                      " features, not for ", num_features, ".");
  for (std::size_t f = 0; f < num_features; ++f) {
    if (!options.block_starts.empty() && !options.block_starts[f].empty()) {
      const auto& starts = options.block_starts[f];
      TESSERA_CHECK_VALUE(static_cast<std::int64_t>(starts.size()) == options.num_buckets + 1 &&
                              starts[0] == 0 && std::is_sorted(starts.begin(), starts.end()),
                          "jagged.bucketize: feature ", f, " has ", starts.size(),
                          " block starts for ", options.num_buckets,
                          " buckets. Give one more than buckets, rising from 0.");
    } else {
      TESSERA_CHECK_VALUE(f < options.block_sizes.size() && options.block_sizes[f] > 0,
                          "jagged.bucketize: feature ", f, " has no block size of at least 1.");
    }
  }
  TESSERA_CHECK_VALUE(!weights.defined() || weights.size(0) == values.numel(),
                      "jagged.bucketize: there are ", weights.defined() ? weights.size(0) : 0,
                      " weights for ", values.numel(), " ids.");
}

template <typename Id>
Bucketized bucketize_as(const at::Tensor& lengths, const at::Tensor& values,
                        const at::Tensor& weights, const BucketizeOptions& options) {
  const at::Tensor ids = values.contiguous();
  const at::Tensor offsets = lengths_to_offsets(lengths.reshape({-1}).to(at::kLong));
  const std::int64_t num_bags = lengths.numel();
  const auto total = offsets[num_bags].item<std::int64_t>();
  TESSERA_CHECK_VALUE(total == ids.numel(), "jagged.bucketize: the lengths add up to ", total,
                      ", but there are ", ids.numel(), " ids.");
  const kernels::BucketTask<Id> task{ids.const_data_ptr<Id>(),
                                     offsets.const_data_ptr<std::int64_t>(), num_bags,
                                     options.num_buckets};
  const std::int64_t grain =
      std::max<std::int64_t>(1, kGrainIds * num_bags / std::max<std::int64_t>(1, total));
  const auto each_feature = [&](auto&& walk) {
    std::int64_t first_bag = 0;
    for (std::size_t f = 0; f < options.bags_per_feature.size(); ++f) {
      const bool is_uneven = !options.block_starts.empty() && !options.block_starts[f].empty();
      const kernels::Blocks blocks{first_bag, first_bag + options.bags_per_feature[f],
                                   is_uneven ? 1 : options.block_sizes[f],
                                   is_uneven ? options.block_starts[f].data() : nullptr};
      at::parallel_for(blocks.first_bag, blocks.end_bag, grain,
                       [&](std::int64_t begin, std::int64_t end) { walk(blocks, begin, end); });
      first_bag = blocks.end_bag;
    }
  };
  at::Tensor counts = at::zeros({options.num_buckets * num_bags}, at::kLong);
  auto* count = counts.data_ptr<std::int64_t>();
  each_feature([&](const kernels::Blocks& blocks, std::int64_t begin, std::int64_t end) {
    kernels::count_buckets(task, blocks, begin, end, count);
  });
  at::Tensor cursors = lengths_to_offsets(counts);
  Bucketized result;
  result.lengths = counts.to(lengths.scalar_type());
  result.values = at::empty_like(ids);
  if (options.positions) result.positions = at::empty_like(ids);
  const bool needs_place = options.unbucketize || weights.defined();
  const at::Tensor place =
      needs_place ? at::empty({total}, at::TensorOptions(at::kLong)) : at::Tensor();
  const kernels::BucketOutput<Id> output{
      result.values.template data_ptr<Id>(),
      options.positions ? result.positions.template data_ptr<Id>() : nullptr,
      needs_place ? place.data_ptr<std::int64_t>() : nullptr};
  auto* cursor = cursors.data_ptr<std::int64_t>();
  each_feature([&](const kernels::Blocks& blocks, std::int64_t begin, std::int64_t end) {
    kernels::fill_buckets(task, blocks, begin, end, cursor, output);
  });
  if (options.unbucketize) result.unbucketize_permute = place;
  if (weights.defined()) {
    // The inverse of `place`, so that weights are read by one differentiable select.
    const at::Tensor from =
        at::empty_like(place).scatter(0, place, at::arange(total, place.options()));
    result.weights = weights.index_select(0, from);
  }
  return result;
}

}  // namespace

Bucketized bucketize(const at::Tensor& lengths, const at::Tensor& values, const at::Tensor& weights,
                     const BucketizeOptions& options) {
  check(lengths, values, weights, options);
  if (detail::has_kernels_for(values)) {
    return detail::device_bucketize(lengths, values, weights, options);
  }
  if (!values.is_cpu()) return detail::bucketize_composed(lengths, values, weights, options);
  return values.scalar_type() == at::kInt
             ? bucketize_as<std::int32_t>(lengths, values, weights, options)
             : bucketize_as<std::int64_t>(lengths, values, weights, options);
}

}  // namespace tessera::jagged
