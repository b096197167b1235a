#include "jagged/composed.h"

#include <numeric>

#include <ATen/Functions.h>

#include "tessera/core/check.h"

namespace tessera::jagged::detail {
namespace {

at::Tensor exclusive(const at::Tensor& sizes) { return sizes.cumsum(0) - sizes; }

}  // namespace

at::Tensor gather_index(const at::Tensor& sizes, const at::Tensor& order) {
  const at::Tensor moved = sizes.index_select(0, order);
  const at::Tensor shift = exclusive(sizes).index_select(0, order) - exclusive(moved);
  const at::Tensor shifts = at::repeat_interleave(shift, moved, 0);
  return shifts + at::arange(shifts.numel(), shifts.options());
}

Bucketized bucketize_composed(const at::Tensor& lengths, const at::Tensor& values,
                              const at::Tensor& weights, const BucketizeOptions& options) {
  const auto index = values.options().dtype(at::kLong);
  const auto device = values.device();
  const auto on_device = [&](const std::vector<std::int64_t>& numbers) {
    return at::tensor(numbers, at::TensorOptions(at::kLong)).to(device);
  };
  const std::int64_t n = options.num_buckets;
  const std::int64_t num_bags = lengths.numel();
  const std::int64_t num_values = values.numel();
  const at::Tensor wide_lengths = lengths.reshape({-1}).to(at::kLong);
  const at::Tensor bag =
      at::repeat_interleave(at::arange(num_bags, index), wide_lengths, 0, num_values);
  // Ids as unsigned numbers: an int32 fits an int64, an int64 needs division by halves.
  at::Tensor id = values.to(at::kLong);
  if (values.scalar_type() == at::kInt) id = id.bitwise_and(0xFFFFFFFFLL);
  const at::Tensor half = id.__rshift__(1).bitwise_and(INT64_MAX);
  at::Tensor quotient = half.div(n, "floor") * 2;
  at::Tensor remainder = id - quotient * n;
  const at::Tensor carry = remainder.ge(n).to(at::kLong);
  quotient = quotient + carry;
  remainder = remainder - carry * n;

  at::Tensor bucket = remainder;
  at::Tensor inner = quotient;
  std::int64_t first_bag = 0;
  for (std::size_t f = 0; f < options.bags_per_feature.size(); ++f) {
    const std::int64_t end_bag = first_bag + options.bags_per_feature[f];
    const at::Tensor is_here = bag.ge(first_bag).logical_and(bag.lt(end_bag));
    const bool is_even = options.block_starts.empty() || options.block_starts[f].empty();
    at::Tensor in_range;
    at::Tensor own_bucket;
    at::Tensor own_id;
    if (is_even) {
      const std::int64_t block = options.block_sizes[f];
      in_range = id.ge(0).logical_and(id.lt(block * n));
      own_bucket = id.div(block, "floor");
      own_id = id - own_bucket * block;
    } else {
      const auto& starts = options.block_starts[f];
      const at::Tensor bounds = on_device(starts);
      in_range = id.ge(0).logical_and(id.lt(starts.back()));
      own_bucket = at::searchsorted(bounds, id, /*out_int32=*/false, /*right=*/true) - 1;
      own_id = id - bounds.index_select(0, own_bucket.clamp(0, n - 1));
    }
    const at::Tensor use = is_here.logical_and(in_range);
    bucket = at::where(use, own_bucket, bucket);
    inner = at::where(use, own_id, inner);
    first_bag = end_bag;
  }
  const at::Tensor target = bucket * num_bags + bag;
  const at::Tensor from = target.argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  Bucketized result;
  result.lengths = at::zeros({n * num_bags}, index)
                       .index_add(0, target, at::ones_like(target))
                       .to(lengths.scalar_type());
  result.values = inner.index_select(0, from).to(values.scalar_type());
  if (weights.defined()) result.weights = weights.index_select(0, from);
  if (options.positions) {
    const at::Tensor begins =
        at::repeat_interleave(exclusive(wide_lengths), wide_lengths, 0, num_values);
    result.positions =
        (at::arange(num_values, index) - begins).index_select(0, from).to(values.scalar_type());
  }
  if (options.unbucketize) {
    result.unbucketize_permute =
        at::empty({num_values}, index).scatter(0, from, at::arange(num_values, index));
  }
  return result;
}

at::Tensor to_padded_composed(const at::Tensor& values, const at::Tensor& offsets,
                              std::int64_t max_length, double padding_value) {
  const at::Tensor begins = offsets.slice(0, 0, -1).unsqueeze(1);
  const at::Tensor place = begins + at::arange(max_length, begins.options());
  const at::Tensor is_there = place.lt(offsets.slice(0, 1).unsqueeze(1));
  auto shape = values.sizes().vec();
  shape[0] = max_length;
  shape.insert(shape.begin(), offsets.numel() - 1);
  if (values.size(0) == 0) return at::full(shape, padding_value, values.options());
  const at::Tensor index = place.clamp(0, values.size(0) - 1).reshape({-1});
  at::Tensor mask = is_there;
  for (std::int64_t d = 1; d < values.dim(); ++d) mask = mask.unsqueeze(-1);
  return at::where(mask, values.index_select(0, index).view(shape),
                   at::full({}, padding_value, values.options()));
}

at::Tensor from_padded_composed(const at::Tensor& dense, const at::Tensor& offsets,
                                std::int64_t num_values) {
  auto shape = dense.sizes().vec();
  shape.erase(shape.begin());
  const std::int64_t max_length = shape[0];
  shape[0] = num_values;
  if (num_values == 0 || max_length == 0) return at::zeros(shape, dense.options());
  const at::Tensor begins = offsets.slice(0, 0, -1);
  const at::Tensor lengths = offsets.slice(0, 1) - begins;
  const at::Tensor bag =
      at::repeat_interleave(at::arange(lengths.numel(), lengths.options()), lengths, 0, num_values);
  const at::Tensor position =
      at::arange(num_values, lengths.options()) - begins.index_select(0, bag);
  const at::Tensor index = bag * max_length + position.clamp(0, max_length - 1);
  at::Tensor mask = position.lt(max_length);
  for (std::size_t d = 1; d < shape.size(); ++d) mask = mask.unsqueeze(-1);
  return at::where(mask, dense.flatten(0, 1).index_select(0, index),
                   at::zeros({}, dense.options()));
}

}  // namespace tessera::jagged::detail
