// trainer/permutation.h — an order of samples that can be asked for by place. No LibTorch.

#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace tessera::trainer {

/// A permutation of [0, size) that is the same for the same seed, and takes no memory: what is read
/// in a step depends on the step alone. A Feistel network over the next power of four; numbers that
/// fall outside are sent through it again.
class Permutation {
 public:
  Permutation(std::int64_t size, std::uint64_t seed)
      : size_(static_cast<std::uint64_t>(size)),
        half_((static_cast<int>(std::bit_width(std::max<std::uint64_t>(size_, 2) - 1)) + 1) / 2),
        seed_(seed) {}

  std::int64_t operator()(std::int64_t place) const {
    auto number = static_cast<std::uint64_t>(place);
    do {
      number = shuffled(number);
    } while (number >= size_);
    return static_cast<std::int64_t>(number);
  }

 private:
  static std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31U);
  }
  std::uint64_t shuffled(std::uint64_t number) const {
    const std::uint64_t mask = (std::uint64_t{1} << static_cast<unsigned>(half_)) - 1;
    std::uint64_t left = number >> static_cast<unsigned>(half_);
    std::uint64_t right = number & mask;
    for (std::uint64_t round = 1; round <= 4; ++round) {
      const std::uint64_t next =
          left ^ (mixed(seed_ + round * 0x9e3779b97f4a7c15U + right * 0xff51afd7ed558ccdU) & mask);
      left = right;
      right = next;
    }
    return left << static_cast<unsigned>(half_) | right;
  }

  std::uint64_t size_;
  int half_;  // bits
  std::uint64_t seed_;
};

}  // namespace tessera::trainer
