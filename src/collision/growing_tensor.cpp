#include "collision/growing_tensor.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include <ATen/ops/from_blob.h>

#include "tessera/core/check.h"

namespace tessera::collision {
namespace {

// No table has more rows; more memory than four times the machine's is not to be had either.
constexpr std::int64_t kMostRows = std::int64_t{1} << 32;

std::size_t most_bytes(std::int64_t row_bytes) {
  const std::int64_t pages = sysconf(_SC_PHYS_PAGES);
  const std::int64_t machine = std::max<std::int64_t>(pages, 1 << 18) * sysconf(_SC_PAGESIZE);
  return static_cast<std::size_t>(std::min(kMostRows * row_bytes, 4 * machine));
}

std::vector<std::int64_t> shape_of(std::int64_t rows, std::int64_t columns) {
  if (columns == 0) return {rows};
  return {rows, columns};
}

}  // namespace

GrowingTensor::GrowingTensor(std::int64_t columns, at::ScalarType type)
    : columns_(columns),
      row_bytes_(std::max<std::int64_t>(columns, 1) *
                 static_cast<std::int64_t>(at::elementSize(type))),
      memory_(std::make_shared<ReservedMemory>(most_bytes(row_bytes_))) {
  // The storage is all that is reserved, so that the tensor grows by another size alone.
  const std::int64_t rows = static_cast<std::int64_t>(memory_->reserved()) / row_bytes_;
  tensor_ = at::from_blob(
      memory_->data(), shape_of(rows, columns_), [memory = memory_](void*) {},
      at::TensorOptions().dtype(type));
  resize(0);
}

bool GrowingTensor::reserve(std::int64_t rows) noexcept {
  // A little more, so that the system is seldom asked.
  constexpr std::size_t kMostAhead = std::size_t{8} << 20;
  const auto needed = static_cast<std::size_t>(rows * row_bytes_);
  if (needed <= memory_->size()) return true;
  const std::size_t wished = needed + std::min(needed / 2, kMostAhead);
  return memory_->grow(std::min(wished, memory_->reserved())) || memory_->grow(needed);
}

void GrowingTensor::resize(std::int64_t rows) {
  TESSERA_INTERNAL_ASSERT(static_cast<std::size_t>(rows * row_bytes_) <= memory_->size(),
                          "rows without memory");
  tensor_.unsafeGetTensorImpl()->set_sizes_contiguous(shape_of(rows, columns_));
}

}  // namespace tessera::collision
