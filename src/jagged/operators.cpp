#include "tessera/jagged/operators.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "core/autograd.h"
#include "jagged/composed.h"
#include "jagged/device.h"
#include "kernels/jagged.h"
#include "tessera/core/check.h"

namespace tessera::jagged {
namespace {

// About 32 KB of copies: below it, another thread is not worth waking.
constexpr std::int64_t kGrainBytes = 32768;

// Segments up to which cutting and concatenating is as good as a kernel.
constexpr std::size_t kFewSegments = 256;

std::int64_t row_bytes(const at::Tensor& data) {
  std::int64_t elements = 1;
  for (std::int64_t d = 1; d < data.dim(); ++d) elements *= data.size(d);
  return elements * static_cast<std::int64_t>(data.element_size());
}

std::int64_t grain_of(std::int64_t num_segments, std::int64_t total_bytes) {
  const std::int64_t bytes = total_bytes / std::max<std::int64_t>(1, num_segments);
  return std::max<std::int64_t>(1, kGrainBytes / std::max<std::int64_t>(1, bytes));
}

bool records(const at::Tensor& data) {
  return data.defined() && data.requires_grad() && at::GradMode::is_enabled();
}

// Running sums in int64, with 0 in front.
at::Tensor wide_offsets(const at::Tensor& sizes) {
  at::Tensor offsets = at::zeros({sizes.numel() + 1}, sizes.options().dtype(at::kLong));
  if (sizes.numel() > 0) offsets.slice(0, 1).copy_(sizes.reshape({-1}).cumsum(0, at::kLong));
  return offsets;
}

/// Segments that lie behind each other and their places in another order, on the CPU.
struct SegmentMoves {
  std::vector<std::int64_t> from;  // where each segment begins, and where the last one ends
  std::vector<std::int64_t> to;    // the same of the moved ones
  const std::int64_t* order;

  SegmentMoves(at::IntArrayRef sizes, at::IntArrayRef order)
      : from(sizes.size() + 1, 0), to(order.size() + 1, 0), order(order.data()) {
    std::partial_sum(sizes.begin(), sizes.end(), from.begin() + 1);
    for (std::size_t s = 0; s < order.size(); ++s) to[s + 1] = to[s] + sizes[order[s]];
  }

  at::Tensor operator()(const at::Tensor& data) const {
    auto shape = data.sizes().vec();
    shape[0] = to.back();
    const auto num_segments = static_cast<std::int64_t>(to.size()) - 1;
    const at::Tensor input = data.contiguous();
    const std::int64_t bytes = row_bytes(input);
    at::Tensor output = at::empty(shape, input.options());
    at::parallel_for(0, num_segments, grain_of(num_segments, shape[0] * bytes),
                     [&](std::int64_t begin, std::int64_t end) {
                       kernels::copy_segments(static_cast<const char*>(input.const_data_ptr()),
                                              bytes, from.data(), order, to.data(), begin, end,
                                              static_cast<char*>(output.data_ptr()));
                     });
    return output;
  }
};

/// The number of values of every segment, a row of `lengths` or one of them. On the CPU.
std::vector<std::int64_t> segment_sizes(const at::Tensor& lengths) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(lengths.size(0)), 0);
  const std::int64_t columns = lengths.dim() == 2 ? lengths.size(1) : 1;
  const at::Tensor rows = lengths.contiguous();
  const auto add = [&](const auto* length) {
    for (std::int64_t& size : sizes) {
      for (std::int64_t c = 0; c < columns; ++c) size += *length++;
    }
  };
  if (rows.scalar_type() == at::kInt) {
    add(rows.const_data_ptr<std::int32_t>());
  } else {
    add(rows.const_data_ptr<std::int64_t>());
  }
  return sizes;
}

/// The sum of the sizes, none of which may be negative.
std::int64_t checked_total(const char* operation, at::IntArrayRef sizes) {
  std::int64_t total = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    TESSERA_CHECK_VALUE(sizes[i] >= 0, operation, ": segment ", i, " has ", sizes[i], " values.");
    total += sizes[i];
  }
  return total;
}

at::Tensor checked_order(const char* operation, const at::Tensor& order, std::int64_t num_segments,
                         c10::Device device) {
  detail::check_integers(order, operation, "the order");
  const at::Tensor wide = order.reshape({-1}).to(at::kLong).contiguous();
  if (wide.is_cpu() && wide.numel() > 0) {
    const auto* begin = wide.const_data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      TESSERA_CHECK_INDEX(begin[i] >= 0 && begin[i] < num_segments, operation, ": entry ", i,
                          " of the order is ", begin[i], "; there are ", num_segments,
                          " segments.");
    }
  }
  // From pinned memory the host does not wait for the device.
  if (wide.is_cpu() && device.is_cuda()) return wide.pin_memory().to(device, true);
  return wide.to(device);
}

/// Whether every segment is named once, as far as the host can see.
bool is_permutation(const at::Tensor& order, std::int64_t num_segments) {
  if (!order.is_cpu() || order.numel() != num_segments) return false;
  const at::Tensor wide = order.reshape({-1}).to(at::kLong).contiguous();
  const auto* entry = wide.const_data_ptr<std::int64_t>();
  std::vector<bool> is_named(static_cast<std::size_t>(num_segments), false);
  for (std::int64_t i = 0; i < num_segments; ++i) {
    if (is_named[static_cast<std::size_t>(entry[i])]) return false;
    is_named[static_cast<std::size_t>(entry[i])] = true;
  }
  return true;
}

/// The segments of CUDA tensors. The host waits for their size only if it cannot know it.
struct DeviceMoves {
  at::Tensor sizes;
  at::Tensor index;
  std::int64_t num_rows = 0;

  DeviceMoves(const at::Tensor& order, const at::Tensor& lengths, at::Tensor index,
              std::int64_t num_values)
      : sizes(lengths.dim() == 2 ? detail::device_row_sums(lengths) : lengths.to(at::kLong)),
        index(std::move(index)),
        num_rows(is_permutation(order, lengths.size(0))
                     ? num_values
                     : sizes.index_select(0, this->index).sum().item<std::int64_t>()) {}

  at::Tensor operator()(const at::Tensor& data) const {
    return detail::device_copy_segments(data, sizes, index, num_rows);
  }
};

JaggedParts permute(const char* operation, const at::Tensor& order, const at::Tensor& lengths,
                    const at::Tensor& values, const at::Tensor& weights) {
  detail::check_integers(lengths, operation, "the lengths");
  const at::Tensor index = checked_order(operation, order, lengths.size(0), lengths.device());
  std::optional<SegmentMoves> moves;
  if (lengths.is_cpu()) {
    const std::vector<std::int64_t> sizes = segment_sizes(lengths);
    const std::int64_t total = checked_total(operation, sizes);
    TESSERA_CHECK_VALUE(total == values.size(0), operation, ": the lengths add up to ", total,
                        ", but there are ", values.size(0), " values.");
    moves.emplace(sizes, at::IntArrayRef(index.const_data_ptr<std::int64_t>(),
                                         static_cast<std::size_t>(index.numel())));
  }
  TESSERA_CHECK_VALUE(!weights.defined() || weights.size(0) == values.size(0), operation,
                      ": there are ", weights.size(0), " weights for ", values.size(0), " values.");
  std::optional<DeviceMoves> device_moves;
  if (detail::has_kernels_for(lengths)) {
    device_moves.emplace(order, lengths, index, values.size(0));
  }
  const auto moved = [&](const at::Tensor& data) {
    if (moves && data.is_cpu() && !records(data)) return (*moves)(data);
    if (device_moves && data.device() == lengths.device() && !records(data)) {
      return (*device_moves)(data);
    }
    const at::Tensor sizes =
        lengths.dim() == 2 ? lengths.sum(1, false, at::kLong) : lengths.to(at::kLong);
    return data.index_select(0, detail::gather_index(sizes, index));
  };
  return {lengths.index_select(0, index), moved(values),
          weights.defined() ? moved(weights) : at::Tensor()};
}

}  // namespace

void detail::check_integers(const at::Tensor& tensor, const char* operation, const char* name) {
  TESSERA_CHECK_TYPE(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong,
                     operation, ": ", name, " must be int32 or int64, not ", tensor.scalar_type(),
                     ".");
}

at::Tensor lengths_to_offsets(const at::Tensor& lengths) {
  detail::check_integers(lengths, "jagged.lengths_to_offsets", "the lengths");
  const at::Tensor flat = lengths.reshape({-1}).contiguous();
  const std::int64_t count = flat.numel();
  if (detail::has_kernels_for(flat)) return detail::device_offsets(flat, flat.scalar_type());
  if (!flat.is_cpu()) return wide_offsets(flat).to(flat.scalar_type());
  at::Tensor offsets = at::empty({count + 1}, flat.options());
  const std::int64_t bad = flat.scalar_type() == at::kInt
                               ? kernels::running_sums(flat.const_data_ptr<std::int32_t>(), count,
                                                       offsets.data_ptr<std::int32_t>())
                               : kernels::running_sums(flat.const_data_ptr<std::int64_t>(), count,
                                                       offsets.data_ptr<std::int64_t>());
  if (bad >= 0) {
    const auto length = flat[bad].item<std::int64_t>();
    TESSERA_CHECK_VALUE(length >= 0, "jagged.lengths_to_offsets: length ", bad, " is ", length,
                        ".");
    TESSERA_CHECK_VALUE(false, "jagged.lengths_to_offsets: the lengths add up to more than an ",
                        flat.scalar_type() == at::kInt ? "int32" : "int64",
                        " can hold, from length ", bad, " on.",
                        flat.scalar_type() == at::kInt ? " Use int64 lengths." : "");
  }
  return offsets;
}

at::Tensor offsets_to_lengths(const at::Tensor& offsets) {
  detail::check_integers(offsets, "jagged.offsets_to_lengths", "the offsets");
  if (offsets.numel() == 0) return at::empty({0}, offsets.options());
  return offsets.slice(0, 1) - offsets.slice(0, 0, -1);
}

at::Tensor offsets_range(const at::Tensor& offsets, std::int64_t num_values) {
  detail::check_integers(offsets, "jagged.offsets_range", "the offsets");
  const auto options = offsets.options().dtype(at::kLong);
  if (num_values == 0) return at::empty({0}, options);
  const at::Tensor wide = offsets.to(at::kLong);
  const at::Tensor begins = at::repeat_interleave(
      wide.slice(0, 0, -1), wide.slice(0, 1) - wide.slice(0, 0, -1), 0, num_values);
  return at::arange(num_values, options) - begins;
}

JaggedParts permute_1d(const at::Tensor& order, const at::Tensor& lengths, const at::Tensor& values,
                       const at::Tensor& weights) {
  TESSERA_CHECK_VALUE(lengths.dim() == 1, "jagged.permute_1d: the lengths have ", lengths.dim(),
                      " dimensions, not 1.");
  return permute("jagged.permute_1d", order, lengths, values, weights);
}

JaggedParts permute_2d(const at::Tensor& order, const at::Tensor& lengths, const at::Tensor& values,
                       const at::Tensor& weights) {
  TESSERA_CHECK_VALUE(lengths.dim() == 2, "jagged.permute_2d: the lengths have ", lengths.dim(),
                      " dimensions, not 2.");
  return permute("jagged.permute_2d", order, lengths, values, weights);
}

at::Tensor permute_segments(const at::Tensor& data, const std::vector<std::int64_t>& sizes,
                            const std::vector<std::int64_t>& order) {
  const auto num_segments = static_cast<std::int64_t>(sizes.size());
  const std::int64_t total = checked_total("jagged.permute_segments", sizes);
  TESSERA_CHECK_VALUE(total == data.size(0), "jagged.permute_segments: the segments add up to ",
                      total, " rows, but there are ", data.size(0), ".");
  for (std::size_t i = 0; i < order.size(); ++i) {
    TESSERA_CHECK_INDEX(order[i] >= 0 && order[i] < num_segments, "jagged.permute_segments: entry ",
                        i, " of the order is ", order[i], "; there are ", num_segments,
                        " segments.");
  }
  if (order.size() > kFewSegments && data.is_cpu() && !records(data)) {
    return SegmentMoves(sizes, order)(data);
  }
  if (order.size() > kFewSegments) {
    const auto options = at::TensorOptions(at::kLong);
    return data.index_select(0, detail::gather_index(at::tensor(sizes, options).to(data.device()),
                                                     at::tensor(order, options).to(data.device())));
  }
  std::vector<std::int64_t> begins(sizes.size() + 1, 0);
  std::partial_sum(sizes.begin(), sizes.end(), begins.begin() + 1);
  std::vector<at::Tensor> parts;
  parts.reserve(order.size());
  for (const std::int64_t s : order) {
    const auto at = static_cast<std::size_t>(s);
    if (sizes[at] > 0) parts.push_back(data.narrow(0, begins[at], sizes[at]));
  }
  return parts.empty() ? data.narrow(0, 0, 0) : at::cat(parts);
}

UniqueIds unique_ids(const at::Tensor& lengths, const at::Tensor& values,
                     const std::vector<std::int64_t>& bags_per_space) {
  detail::check_integers(lengths, "jagged.unique_ids", "the lengths");
  detail::check_integers(values, "jagged.unique_ids", "the ids");
  const std::int64_t num_bags =
      std::accumulate(bags_per_space.begin(), bags_per_space.end(), std::int64_t{0});
  TESSERA_CHECK_VALUE(num_bags == lengths.numel(), "jagged.unique_ids: the spaces have ", num_bags,
                      " bags, but there are ", lengths.numel(), " lengths.");
  const at::Tensor offsets = wide_offsets(lengths).cpu();
  const auto total = offsets[num_bags].item<std::int64_t>();
  TESSERA_CHECK_VALUE(total == values.numel(), "jagged.unique_ids: the lengths add up to ", total,
                      ", but there are ", values.numel(), " ids.");
  const auto* begins = offsets.const_data_ptr<std::int64_t>();
  std::vector<at::Tensor> ids;
  std::vector<at::Tensor> reverse;
  std::vector<std::int64_t> spread;
  spread.reserve(static_cast<std::size_t>(num_bags));
  std::int64_t bag = 0;
  std::int64_t base = 0;
  for (const std::int64_t bags : bags_per_space) {
    const std::int64_t first = begins[bag];
    const std::int64_t count = begins[bag + bags] - first;
    std::int64_t found = 0;
    if (count > 0) {
      auto [unique, inverse, counts] =
          at::_unique2(values.narrow(0, first, count), /*sorted=*/true, /*return_inverse=*/true);
      found = unique.numel();
      ids.push_back(unique);
      reverse.push_back(inverse + base);
    }
    for (std::int64_t b = 0; b < bags; ++b) {
      spread.push_back(found / bags + (b < found % bags ? 1 : 0));
    }
    bag += bags;
    base += found;
  }
  const auto index = values.options().dtype(at::kLong);
  return {ids.empty() ? values.narrow(0, 0, 0) : at::cat(ids),
          at::tensor(spread, at::TensorOptions(at::kLong)).to(lengths.options()),
          reverse.empty() ? at::empty({0}, index) : at::cat(reverse)};
}

namespace {

// Two functions, each the other's backward, so derivatives of any order are right.
struct ToPadded : Function<ToPadded> {
  static Variable forward(AutogradContext* context, const Variable& values, const Variable& offsets,
                          std::int64_t max_length, double padding_value);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

struct FromPadded : Function<FromPadded> {
  static Variable forward(AutogradContext* context, const Variable& dense, const Variable& offsets,
                          std::int64_t num_values);
  static variable_list backward(AutogradContext* context, const variable_list& grads);
};

Variable ToPadded::forward(AutogradContext* context, const Variable& values,
                           const Variable& offsets, std::int64_t max_length, double padding_value) {
  context->save_for_backward({offsets});
  context->saved_data["num_values"] = values.size(0);
  const std::int64_t bags = offsets.numel() - 1;
  auto shape = values.sizes().vec();
  shape[0] = max_length;
  shape.insert(shape.begin(), bags);
  const at::Tensor input = values.contiguous();
  const std::int64_t bytes = row_bytes(input);
  at::Tensor dense = at::full(shape, padding_value, input.options());
  at::parallel_for(0, bags, grain_of(bags, bags * max_length * bytes),
                   [&](std::int64_t begin, std::int64_t end) {
                     kernels::copy_to_rows(static_cast<const char*>(input.const_data_ptr()), bytes,
                                           offsets.const_data_ptr<std::int64_t>(), max_length,
                                           begin, end, static_cast<char*>(dense.data_ptr()));
                   });
  return dense;
}

variable_list ToPadded::backward(AutogradContext* context, const variable_list& grads) {
  const Variable offsets = context->get_saved_variables()[0];
  return {FromPadded::apply(grads[0], offsets, context->saved_data["num_values"].toInt()),
          Variable(), Variable(), Variable()};
}

Variable FromPadded::forward(AutogradContext* context, const Variable& dense,
                             const Variable& offsets, std::int64_t num_values) {
  context->save_for_backward({offsets});
  context->saved_data["max_length"] = dense.size(1);
  auto shape = dense.sizes().vec();
  shape.erase(shape.begin());
  const std::int64_t max_length = shape[0];
  shape[0] = num_values;
  const at::Tensor input = dense.contiguous();
  at::Tensor values = at::empty(shape, input.options());
  const std::int64_t bytes = row_bytes(values);
  const std::int64_t bags = offsets.numel() - 1;
  at::parallel_for(
      0, bags, grain_of(bags, num_values * bytes), [&](std::int64_t begin, std::int64_t end) {
        kernels::copy_from_rows(static_cast<const char*>(input.const_data_ptr()), bytes,
                                offsets.const_data_ptr<std::int64_t>(), max_length, begin, end,
                                static_cast<char*>(values.data_ptr()));
      });
  return values;
}

variable_list FromPadded::backward(AutogradContext* context, const variable_list& grads) {
  const Variable offsets = context->get_saved_variables()[0];
  return {ToPadded::apply(grads[0], offsets, context->saved_data["max_length"].toInt(), 0.0),
          Variable(), Variable()};
}

at::Tensor padded_offsets(const char* operation, const at::Tensor& offsets,
                          std::int64_t num_values) {
  detail::check_integers(offsets, operation, "the offsets");
  TESSERA_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() > 0, operation,
                      ": the offsets must be [bags + 1], not ", offsets.sizes(), ".");
  const at::Tensor wide = offsets.to(at::kLong).contiguous();
  if (wide.is_cpu()) {
    const auto* at = wide.const_data_ptr<std::int64_t>();
    const std::int64_t bags = wide.numel() - 1;
    TESSERA_CHECK_VALUE(at[0] == 0 && at[bags] == num_values && std::is_sorted(at, at + bags + 1),
                        operation, ": the offsets must rise from 0 to the number of values, ",
                        num_values, "; they go from ", at[0], " to ", at[bags], ".");
  }
  return wide;
}

}  // namespace

at::Tensor jagged_to_padded_dense(const at::Tensor& values, const at::Tensor& offsets,
                                  std::int64_t max_length, double padding_value) {
  TESSERA_CHECK_VALUE(max_length >= 0, "jagged.to_padded_dense: the length is ", max_length, ".");
  const at::Tensor wide = padded_offsets("jagged.to_padded_dense", offsets, values.size(0));
  if (!values.is_cpu()) {
    return detail::to_padded_composed(values, wide, max_length, padding_value);
  }
  return ToPadded::apply(values, wide, max_length, padding_value);
}

at::Tensor padded_dense_to_jagged(const at::Tensor& dense, const at::Tensor& offsets,
                                  std::int64_t num_values) {
  const at::Tensor wide = padded_offsets("jagged.padded_dense_to_jagged", offsets, num_values);
  TESSERA_CHECK_VALUE(dense.dim() >= 2 && dense.size(0) == wide.numel() - 1,
                      "jagged.padded_dense_to_jagged: the dense tensor has shape ", dense.sizes(),
                      ", the offsets have ", wide.numel() - 1, " bags.");
  if (!dense.is_cpu()) return detail::from_padded_composed(dense, wide, num_values);
  return FromPadded::apply(dense, wide, num_values);
}

}  // namespace tessera::jagged
