#include "data_parallel/signed_message.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/round.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "kernels/byte_rows.h"

namespace tessera::data_parallel {
namespace {

constexpr float kLargestLevel = 127.0F;
constexpr float kSmallestScale = std::numeric_limits<float>::min();
// Numbers per task of a thread, and those summed over the ranks while they are in the first-level
// cache.
constexpr std::int64_t kTask = 32768;
constexpr std::int64_t kSumBlock = 2048;

std::int64_t head_of(const std::vector<std::int64_t>& lengths) {
  return static_cast<std::int64_t>(lengths.size() * sizeof(float));
}

float larger_or_nan(float a, float b) { return std::isnan(a) || a > b ? a : b; }

at::Tensor pack_signed_on_cpu(const at::Tensor& values, const std::vector<std::int64_t>& lengths,
                              std::vector<at::Tensor>& losses) {
  const auto& kernels = kernels::byte_row_kernels();
  const std::int64_t head = head_of(lengths);
  at::Tensor message = at::empty({head + values.numel()}, values.options().dtype(at::kChar));
  auto* const scales = message.data_ptr<std::int8_t>();
  std::int8_t* bytes = scales + head;
  const float* from = values.const_data_ptr<float>();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const std::int64_t length = lengths[i];
    const bool had_loss = losses[i].defined();
    if (!had_loss) losses[i] = at::empty({length}, values.options());
    auto* const sum = losses[i].data_ptr<float>();
    const float largest = at::parallel_reduce(
        0, length, kTask, 0.0F,
        [&](std::int64_t begin, std::int64_t end, float most) {
          return larger_or_nan(kernels.carry(from + begin, had_loss ? sum + begin : nullptr,
                                             end - begin, sum + begin),
                               most);
        },
        larger_or_nan);
    float scale = largest / kLargestLevel;
    if (scale < kSmallestScale) scale = kSmallestScale;
    if (length == 0) scale = 0;
    std::memcpy(scales + i * sizeof(float), &scale, sizeof(scale));
    at::parallel_for(0, length, kTask, [&](std::int64_t begin, std::int64_t end) {
      kernels.pack_signed(sum + begin, end - begin, scale, bytes + begin);
    });
    from += length;
    bytes += length;
  }
  return message;
}

void unpack_signed_on_cpu(const at::Tensor& messages, const std::vector<std::int64_t>& lengths,
                          double divisor, float* output) {
  const auto& kernels = kernels::byte_row_kernels();
  const std::int64_t ranks = messages.size(0);
  const std::int64_t stride = messages.size(1);
  const auto* const all = messages.const_data_ptr<std::int8_t>();
  const auto by = static_cast<float>(divisor);
  std::int64_t offset = head_of(lengths);  // of the part's bytes in each message
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    at::parallel_for(0, lengths[i], kTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t first = begin; first < end; first += kSumBlock) {
        const std::int64_t count = std::min(kSumBlock, end - first);
        float* const sum = output + first;
        std::fill(sum, sum + count, 0.0F);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
          const std::int8_t* const message = all + rank * stride;
          float scale = 0;
          std::memcpy(&scale, message + i * sizeof(float), sizeof(scale));
          kernels.add_signed(message + offset + first, count, scale, sum);
        }
        for (std::int64_t k = 0; k < count; ++k) sum[k] /= by;
      }
    });
    offset += lengths[i];
    output += lengths[i];
  }
}

at::Tensor pack_signed_composed(const at::Tensor& values, const std::vector<std::int64_t>& lengths,
                                std::vector<at::Tensor>& losses) {
  std::vector<at::Tensor> scales;
  const at::Tensor bytes = at::empty({values.numel()}, values.options().dtype(at::kChar));
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const at::Tensor part = values.narrow(0, offset, lengths[i]);
    const at::Tensor sum = losses[i].defined() ? losses[i].add_(part) : part.clone();
    scales.push_back(lengths[i] == 0
                         ? at::zeros({}, values.options())
                         : sum.abs().amax().div(kLargestLevel).clamp_min(kSmallestScale));
    const at::Tensor levels = bytes.narrow(0, offset, lengths[i]);
    levels.copy_(at::round(sum / scales[i]));
    losses[i] = sum.sub_(levels.to(at::kFloat).mul_(scales[i]));
    offset += lengths[i];
  }
  return at::cat({at::stack(scales).view(at::kChar).view(-1), bytes});
}

at::Tensor unpack_signed_composed(const at::Tensor& messages,
                                  const std::vector<std::int64_t>& lengths, double divisor) {
  const std::int64_t head = head_of(lengths);
  at::Tensor sum;
  for (std::int64_t rank = 0; rank < messages.size(0); ++rank) {
    const at::Tensor scales = messages[rank].narrow(0, 0, head).clone().view(at::kFloat);
    at::Tensor numbers = messages[rank].narrow(0, head, messages.size(1) - head).to(at::kFloat);
    std::int64_t offset = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      numbers.narrow(0, offset, lengths[i]).mul_(scales[static_cast<std::int64_t>(i)]);
      offset += lengths[i];
    }
    sum = rank == 0 ? numbers : sum.add_(numbers);
  }
  return sum.div_(divisor);
}

}  // namespace

at::Tensor pack_signed(const at::Tensor& values, const std::vector<std::int64_t>& lengths,
                       std::vector<at::Tensor>& losses) {
  return values.is_cpu() ? pack_signed_on_cpu(values.contiguous(), lengths, losses)
                         : pack_signed_composed(values, lengths, losses);
}

void unpack_signed_average(const at::Tensor& messages, const std::vector<std::int64_t>& lengths,
                           double divisor, const at::Tensor& output) {
  if (!messages.is_cpu()) {
    output.copy_(unpack_signed_composed(messages, lengths, divisor));
  } else if (output.scalar_type() == at::kFloat && output.is_contiguous()) {
    unpack_signed_on_cpu(messages.contiguous(), lengths, divisor, output.data_ptr<float>());
  } else {
    const at::Tensor wide = at::empty(output.sizes(), output.options().dtype(at::kFloat));
    unpack_signed_on_cpu(messages.contiguous(), lengths, divisor, wide.data_ptr<float>());
    output.copy_(wide);
  }
}

}  // namespace tessera::data_parallel
