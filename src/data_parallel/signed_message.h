// data_parallel/signed_message.h — numbers as signed bytes, and what rounding them loses.
//
// A message is [a scale for every part, float32 | one signed byte per number]. Parts lie behind
// each other, with `lengths` numbers each.

#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::data_parallel {

/// The message of flat float32 `values` with `losses` added, one per part: flat, float32 and on
/// the same device, or undefined where nothing was lost yet. They become what is lost this time, in
/// the memory they have.
at::Tensor pack_signed(const at::Tensor& values, const std::vector<std::int64_t>& lengths,
                       std::vector<at::Tensor>& losses);

/// The sum of the ranks' messages, one row of `messages` each, over `divisor`: into the flat
/// `output`, of any floating type.
void unpack_signed_average(const at::Tensor& messages, const std::vector<std::int64_t>& lengths,
                           double divisor, const at::Tensor& output);

}  // namespace tessera::data_parallel
