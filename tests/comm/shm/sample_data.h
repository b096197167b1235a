// tests/comm/shm/sample_data.h — reproducible elements of any type, and the plain answer.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "comm/transport.h"
#include "kernels/reduce.h"

namespace tessera::comm::shm::testing {

inline constexpr DataType kAllTypes[] = {
    DataType::kBool,    DataType::kUInt8,  DataType::kInt8,    DataType::kInt16,
    DataType::kInt32,   DataType::kInt64,  DataType::kFloat16, DataType::kBFloat16,
    DataType::kFloat32, DataType::kFloat64};
inline constexpr ReduceOp kAllReductions[] = {ReduceOp::kSum, ReduceOp::kAvg,     ReduceOp::kMin,
                                              ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kBand,
                                              ReduceOp::kBor, ReduceOp::kBxor};

using Bytes = std::vector<std::byte>;

/// `count` elements that depend on the seed; finite, and of moderate size where they are floats.
inline Bytes sample(DataType dtype, std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed * 7919 + 17);
  const std::size_t width = size_of(dtype);
  Bytes bytes(static_cast<std::size_t>(count) * width);
  for (std::size_t i = 0; i < bytes.size(); i += width) {
    std::uint64_t bits = random();
    if (dtype == DataType::kBool) bits &= 1;
    if (dtype == DataType::kFloat16) bits = (bits & 0x8FFF) | 0x3000;
    if (dtype == DataType::kBFloat16) bits = (bits & 0x81FF) | 0x3E00;
    if (dtype == DataType::kFloat32) bits = (bits & 0x81FFFFFF) | 0x3E000000;
    if (dtype == DataType::kFloat64) bits = (bits & 0x801FFFFFFFFFFFFF) | 0x3FE0000000000000;
    std::memcpy(bytes.data() + i, &bits, width);
  }
  return bytes;
}

/// The reduction of one array per rank, by the plain loops.
inline Bytes reduced(DataType dtype, ReduceOp op, const std::vector<Bytes>& inputs) {
  Bytes result(inputs[0].size());
  std::vector<const void*> sources;
  for (const Bytes& input : inputs) sources.push_back(input.data());
  void* destination = result.data();
  kernels::reduce_reference().reduce(
      dtype, op, sources.data(), static_cast<int>(sources.size()), &destination, 1,
      static_cast<std::int64_t>(result.size() / size_of(dtype)), kernels::Store::kCached);
  return result;
}

}  // namespace tessera::comm::shm::testing
