// data_parallel/byte_message.h — numbers as bytes, with the ranges they are in, in one message.
//
// A message is [scale and zero point of every row, float32 | one byte per number]. Rows have `row`
// numbers each, the last one what is left. A range always holds zero, so zeros stay zero.

#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera::data_parallel {

/// The message of flat float32 `values`, at least one.
at::Tensor pack_bytes(const at::Tensor& values, std::int64_t row);

/// The sum of the ranks' messages, one row of `messages` each, over `divisor`: into the flat
/// `output`, of any floating type.
void unpack_average(const at::Tensor& messages, std::int64_t row, double divisor,
                    const at::Tensor& output);

}  // namespace tessera::data_parallel
