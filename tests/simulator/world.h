// tests/simulator/world.h — what a seed is run in.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tessera::simulator {

/// A promise that was not kept.
class Broken : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(bool holds, const std::string& promise) {
  if (!holds) throw Broken(promise);
}

/// Each runs one seed, and throws Broken. `tells` prints what happens.
void run_checkpoints(std::uint64_t seed, bool tells);
void run_channels(std::uint64_t seed, bool tells);
void run_agreement(std::uint64_t seed, bool tells);
void run_launchers(std::uint64_t seed, bool tells);
void run_meetings(std::uint64_t seed, bool tells);

}  // namespace tessera::simulator
