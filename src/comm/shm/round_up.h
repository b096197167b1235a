// src/comm/shm/round_up.h — sizes in whole pages, lines and the like.

#pragma once

#include <cstddef>

namespace tessera::comm::shm {

constexpr std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace tessera::comm::shm
