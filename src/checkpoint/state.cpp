#include "tessera/checkpoint/state.h"

#include <ATen/ATen.h>

#include "tessera/core/check.h"

namespace tessera::checkpoint {

Stateful::~Stateful() = default;
void Stateful::finish(const Values&) {}
void Stateful::collect_delta(std::vector<PlacedTensor>& tensors, std::vector<ListDelta>&,
                             Values& values) {
  collect(tensors, values);
}

void State::add_replicated(std::string name, at::Tensor tensor, int owner) {
  PlacedTensor placed;
  placed.name = std::move(name);
  placed.shape = tensor.sizes().vec();
  placed.is_replicated = true;
  placed.owner = owner;
  placed.pieces.push_back({std::vector<std::int64_t>(tensor.dim(), 0), std::move(tensor), {}});
  add(std::move(placed));
}

void State::add_shard(std::string name, std::vector<std::int64_t> shape,
                      std::vector<std::int64_t> offsets, at::Tensor tensor) {
  PlacedTensor placed;
  placed.name = std::move(name);
  placed.shape = std::move(shape);
  placed.pieces.push_back({std::move(offsets), std::move(tensor), {}});
  add(std::move(placed));
}

TouchedRows::TouchedRows(std::int64_t num_rows) : is_touched_(at::zeros({num_rows}, at::kBool)) {}

void TouchedRows::mark(const at::Tensor& rows) {
  is_touched_.index_fill_(0, rows.reshape({-1}).to(at::kLong), true);
}

at::Tensor TouchedRows::rows() const { return is_touched_.nonzero().squeeze(1); }

void TouchedRows::clear() { is_touched_.zero_(); }

Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return Dtype::kBool;
    case at::kByte:
      return Dtype::kU8;
    case at::kChar:
      return Dtype::kI8;
    case at::kFloat8_e5m2:
      return Dtype::kF8E5M2;
    case at::kFloat8_e4m3fn:
      return Dtype::kF8E4M3;
    case at::kShort:
      return Dtype::kI16;
    case at::kUInt16:
      return Dtype::kU16;
    case at::kHalf:
      return Dtype::kF16;
    case at::kBFloat16:
      return Dtype::kBf16;
    case at::kInt:
      return Dtype::kI32;
    case at::kUInt32:
      return Dtype::kU32;
    case at::kFloat:
      return Dtype::kF32;
    case at::kLong:
      return Dtype::kI64;
    case at::kUInt64:
      return Dtype::kU64;
    case at::kDouble:
      return Dtype::kF64;
    case at::kComplexFloat:
      return Dtype::kC64;
    default:
      TESSERA_CHECK_TYPE(false, "checkpoint: elements of type ", c10::toString(type),
                         " cannot be stored. Convert the tensor first.");
  }
  return Dtype::kF32;
}

at::ScalarType scalar_type_of(Dtype dtype) {
  constexpr at::ScalarType kTypes[] = {
      at::kBool,   at::kByte,   at::kChar,     at::kFloat8_e5m2, at::kFloat8_e4m3fn, at::kShort,
      at::kUInt16, at::kHalf,   at::kBFloat16, at::kInt,         at::kUInt32,        at::kFloat,
      at::kLong,   at::kUInt64, at::kDouble,   at::kComplexFloat};
  return kTypes[static_cast<std::size_t>(dtype)];
}

}  // namespace tessera::checkpoint
