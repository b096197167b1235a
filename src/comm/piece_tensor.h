// src/comm/piece_tensor.h — a Piece as a tensor over the same memory.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include "comm/transport.h"

namespace tessera::comm {

/// LibTorch's type of the same width and meaning; bools are seen as bytes.
inline at::ScalarType scalar_type(DataType dtype) {
  switch (dtype) {
    case DataType::kBool:
    case DataType::kUInt8:
      return at::kByte;  // a bool is a byte that is 0 or 1
    case DataType::kInt8:
      return at::kChar;
    case DataType::kInt16:
      return at::kShort;
    case DataType::kInt32:
      return at::kInt;
    case DataType::kInt64:
      return at::kLong;
    case DataType::kFloat16:
      return at::kHalf;
    case DataType::kBFloat16:
      return at::kBFloat16;
    case DataType::kFloat32:
      return at::kFloat;
    case DataType::kFloat64:
      return at::kDouble;
  }
  return at::kByte;
}

/// The elements of `piece` as a flat tensor. Does not own the memory.
inline at::Tensor as_tensor(DataType dtype, Piece piece) {
  return at::from_blob(piece.data, {piece.count}, scalar_type(dtype));
}

}  // namespace tessera::comm
