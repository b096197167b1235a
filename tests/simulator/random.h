// tests/simulator/random.h — the one source of chance: a run is its seed.

#pragma once

#include <cstdint>
#include <vector>

namespace tessera::simulator {

/// SplitMix64.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  /// From 0 to `end` - 1.
  std::uint64_t below(std::uint64_t end) { return end == 0 ? 0 : next() % end; }
  std::int64_t between(std::int64_t first, std::int64_t last) {
    return first + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(last - first + 1)));
  }
  bool one_in(std::uint64_t count) { return below(count) == 0; }
  bool flip() { return (next() & 1) != 0; }
  template <typename T>
  const T& pick(const std::vector<T>& from) {
    return from[below(from.size())];
  }

 private:
  std::uint64_t state_;
};

}  // namespace tessera::simulator
