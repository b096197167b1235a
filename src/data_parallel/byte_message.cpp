#include "data_parallel/byte_message.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/round.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "kernels/byte_rows.h"

namespace tessera::data_parallel {
namespace {

constexpr float kLevels = 255.0F;
constexpr float kLeastScale = std::numeric_limits<float>::epsilon();
// Numbers that are summed over the ranks while they are in the first-level cache.
constexpr std::int64_t kBlock = 2048;

/// What the bytes of a row mean, as it travels.
struct RowRange {
  float scale;
  float zero;
};
constexpr auto kRangeBytes = static_cast<std::int64_t>(sizeof(RowRange));

std::int64_t rows_of(std::int64_t length, std::int64_t row) { return (length + row - 1) / row; }

/// Numbers of a message of `bytes` bytes.
std::int64_t length_of(std::int64_t bytes, std::int64_t row) {
  // Whole rows take row + kRangeBytes bytes each; the last one may be shorter.
  return bytes - kRangeBytes * rows_of(bytes, row + kRangeBytes);
}

/// NaN if a value is: what is unpacked is NaN, too.
RowRange range_of(const float* values, std::int64_t count) {
  float low = 0;
  float high = 0;
  kernels::byte_row_kernels().range(values, count, &low, &high);
  RowRange range;
  range.scale = (high - low) / kLevels;
  if (range.scale < kLeastScale) range.scale = kLeastScale;
  range.zero = -std::nearbyint(low / range.scale);
  if (range.zero > kLevels) range.zero = kLevels;
  return range;
}

at::Tensor pack_on_cpu(const at::Tensor& values, std::int64_t row) {
  const std::int64_t length = values.numel();
  const std::int64_t rows = rows_of(length, row);
  at::Tensor message = at::empty({rows * kRangeBytes + length}, values.options().dtype(at::kByte));
  auto* head = message.data_ptr<std::uint8_t>();
  std::uint8_t* bytes = head + rows * kRangeBytes;
  const float* from = values.const_data_ptr<float>();
  at::parallel_for(0, rows, std::max<std::int64_t>(1, 32768 / row),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t r = begin; r < end; ++r) {
                       const std::int64_t count = std::min(row, length - r * row);
                       const RowRange range = range_of(from + r * row, count);
                       std::memcpy(head + r * kRangeBytes, &range, sizeof(range));
                       kernels::byte_row_kernels().pack(from + r * row, count, range.scale,
                                                        range.zero, bytes + r * row);
                     }
                   });
  return message;
}

void unpack_on_cpu(const at::Tensor& messages, std::int64_t row, double divisor, float* output) {
  const std::int64_t ranks = messages.size(0);
  const std::int64_t length = length_of(messages.size(1), row);
  const std::int64_t head = rows_of(length, row) * kRangeBytes;
  const auto* all = messages.const_data_ptr<std::uint8_t>();
  const auto by = static_cast<float>(divisor);
  // A row is one or more blocks, none of which reaches into the next row.
  const std::int64_t per_row = rows_of(row, kBlock);
  at::parallel_for(0, rows_of(length, row) * per_row, 16,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t b = begin; b < end; ++b) {
                       const std::int64_t r = b / per_row;
                       const std::int64_t first = r * row + b % per_row * kBlock;
                       const std::int64_t last = std::min({first + kBlock, (r + 1) * row, length});
                       if (first >= last) continue;
                       std::fill(output + first, output + last, 0.0F);
                       for (std::int64_t rank = 0; rank < ranks; ++rank) {
                         const std::uint8_t* message = all + rank * messages.size(1);
                         RowRange range;
                         std::memcpy(&range, message + r * kRangeBytes, sizeof(range));
                         kernels::byte_row_kernels().add(message + head + first, last - first,
                                                         range.scale, range.zero, output + first);
                       }
                       for (std::int64_t i = first; i < last; ++i) output[i] /= by;
                     }
                   });
}

/// [rows, row], the last one filled up with zeros.
at::Tensor as_rows(const at::Tensor& values, std::int64_t row) {
  const std::int64_t missing = rows_of(values.numel(), row) * row - values.numel();
  const at::Tensor whole =
      missing == 0 ? values : at::cat({values, at::zeros({missing}, values.options())});
  return whole.view({-1, row});
}

at::Tensor pack_composed(const at::Tensor& values, std::int64_t row) {
  const at::Tensor rows = as_rows(values, row);
  auto [low, high] = at::aminmax(rows, 1);
  low = low.clamp_max(0);
  const at::Tensor scale = ((high.clamp_min(0) - low) / kLevels).clamp_min(kLeastScale);
  const at::Tensor zero = (0 - at::round(low / scale)).clamp(0, kLevels);
  const at::Tensor bytes =
      at::round(rows / scale.unsqueeze(1)).add_(zero.unsqueeze(1)).clamp_(0, kLevels).to(at::kByte);
  // Only as many bytes as there are values: the filling is known to be zero.
  return at::cat({at::stack({scale, zero}, 1).view(at::kByte).view(-1),
                  bytes.view(-1).narrow(0, 0, values.numel())});
}

at::Tensor unpack_composed(const at::Tensor& messages, std::int64_t row, double divisor) {
  const std::int64_t length = length_of(messages.size(1), row);
  const std::int64_t head = rows_of(length, row) * kRangeBytes;
  at::Tensor sum;
  for (std::int64_t rank = 0; rank < messages.size(0); ++rank) {
    // Copied: the message's own bytes may begin anywhere.
    const at::Tensor ranges =
        messages[rank].narrow(0, 0, head).clone().view(at::kFloat).view({-1, 2});
    const at::Tensor numbers =
        (as_rows(messages[rank].narrow(0, head, length).to(at::kFloat), row) -
         ranges.select(1, 1).unsqueeze(1))
            .mul_(ranges.select(1, 0).unsqueeze(1));
    sum = rank == 0 ? numbers : sum.add_(numbers);
  }
  return sum.view(-1).narrow(0, 0, length).div_(divisor);
}

}  // namespace

at::Tensor pack_bytes(const at::Tensor& values, std::int64_t row) {
  return values.is_cpu() ? pack_on_cpu(values.contiguous(), row) : pack_composed(values, row);
}

void unpack_average(const at::Tensor& messages, std::int64_t row, double divisor,
                    const at::Tensor& output) {
  if (!messages.is_cpu()) {
    output.copy_(unpack_composed(messages, row, divisor));
  } else if (output.scalar_type() == at::kFloat && output.is_contiguous()) {
    unpack_on_cpu(messages.contiguous(), row, divisor, output.data_ptr<float>());
  } else {
    const at::Tensor wide = at::empty(output.sizes(), output.options().dtype(at::kFloat));
    unpack_on_cpu(messages.contiguous(), row, divisor, wide.data_ptr<float>());
    output.copy_(wide);
  }
}

}  // namespace tessera::data_parallel
