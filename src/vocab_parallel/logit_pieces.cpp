#include "vocab_parallel/logit_pieces.h"

#include <algorithm>
#include <vector>

#include <ATen/Functions.h>

#include "tessera/core/check.h"

namespace tessera::vocab_parallel::detail {
namespace {

// Small enough to be no burden, large enough to keep a device busy.
constexpr std::int64_t kCopyBytes = std::int64_t{8} << 20;

struct Extent {
  std::int64_t size;
  std::int64_t stride;
};

std::int64_t num_rows_of(const at::Tensor& tensor) {
  const std::int64_t columns = tensor.size(-1);
  return columns == 0 ? c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1))
                      : tensor.numel() / columns;
}

}  // namespace

kernels::Element element_of(const at::Tensor& logits) {
  switch (logits.scalar_type()) {
    case at::kBFloat16:
      return kernels::Element::kBFloat16;
    case at::kHalf:
      return kernels::Element::kFloat16;
    default:
      return kernels::Element::kFloat32;
  }
}

bool as_rows(const at::Tensor& tensor, kernels::LogitRows& rows) {
  if (tensor.size(-1) > 1 && tensor.stride(-1) != 1) return false;
  // Merges neighbouring dimensions that continue each other, last to first.
  std::vector<Extent> extents;
  for (std::int64_t d = tensor.dim() - 2; d >= 0; --d) {
    const Extent extent{tensor.size(d), tensor.stride(d)};
    if (extent.size == 1) continue;
    if (!extents.empty() && extent.stride == extents.back().size * extents.back().stride) {
      extents.back().size *= extent.size;
    } else {
      extents.push_back(extent);
    }
  }
  if (extents.size() > 2) return false;
  rows.element = element_of(tensor);
  rows.data = tensor.const_data_ptr();
  rows.num_rows = num_rows_of(tensor);
  rows.num_columns = tensor.size(-1);
  rows.inner_rows = extents.empty() ? 1 : std::max<std::int64_t>(extents[0].size, 1);
  rows.inner_stride = extents.empty() ? 0 : extents[0].stride;
  rows.outer_stride = extents.size() < 2 ? 0 : extents[1].stride;
  return true;
}

void for_each_piece(
    const at::Tensor& logits, bool write_back,
    const std::function<void(const at::Tensor& piece, std::int64_t first_row)>& body) {
  kernels::LogitRows rows;
  if (as_rows(logits, rows)) return body(logits, 0);
  if (num_rows_of(logits) == 0) return;
  const std::int64_t rows_per_slice = num_rows_of(logits) / logits.size(0);
  const std::int64_t slice_bytes =
      std::max<std::int64_t>(rows_per_slice * logits.size(-1) * logits.element_size(), 1);
  const std::int64_t step = std::clamp<std::int64_t>(kCopyBytes / slice_bytes, 1,
                                                     std::max<std::int64_t>(logits.size(0), 1));
  for (std::int64_t first = 0; first < logits.size(0); first += step) {
    at::Tensor slice = logits.slice(0, first, std::min(first + step, logits.size(0)));
    if (step == 1 && logits.dim() > 2 && slice_bytes > kCopyBytes) {
      for_each_piece(slice.select(0, 0), write_back,
                     [&](const at::Tensor& piece, std::int64_t row) {
                       body(piece, first * rows_per_slice + row);
                     });
      continue;
    }
    const at::Tensor copy = slice.contiguous();
    body(copy, first * rows_per_slice);
    if (write_back) slice.copy_(copy);
  }
}

}  // namespace tessera::vocab_parallel::detail
