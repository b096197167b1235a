// src/jagged/text.h — bags and columns as text, for people.

#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace tessera::jagged::detail {

/// "[1, 2]" or "[[1.0, 2.0], [3.0, 4.0]]" of rows `begin` to `end` - 1 of a tensor on the CPU.
std::string rows_text(const at::Tensor& values, std::int64_t begin, std::int64_t end);

/// "[[1, 2], [], [3]]": bags `begin` to `end` - 1. Both tensors on the CPU, `offsets` int64.
std::string bags_text(const at::Tensor& values, const at::Tensor& offsets, std::int64_t begin,
                      std::int64_t end);

}  // namespace tessera::jagged::detail
