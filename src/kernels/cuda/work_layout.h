// src/kernels/cuda/work_layout.h — where the arrays of a call lie in its work memory.

#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera::kernels::cuda {

/// Lays arrays one behind another, each at a multiple of 256 bytes.
class WorkLayout {
 public:
  /// Returns where an array of so many bytes begins.
  std::size_t take(std::size_t bytes) {
    const std::size_t here = end_;
    end_ += (bytes + 255) / 256 * 256;
    return here;
  }
  /// The same of 32-bit numbers.
  std::size_t take_numbers(std::size_t count) { return take(4 * count); }

  std::size_t bytes() const { return end_; }

 private:
  std::size_t end_ = 0;
};

/// Finds arrays by where they begin.
inline auto arrays_in(void* work) {
  return [work](std::size_t at) {
    return reinterpret_cast<std::uint32_t*>(static_cast<char*>(work) + at);
  };
}

}  // namespace tessera::kernels::cuda
