// lm/unicode_classes.h — which characters are letters and numbers; made when the library is built.

#pragma once

#include <cstdint>
#include <span>

namespace tessera::workloads::lm {

/// Characters in a row.
struct CodePoints {
  std::uint32_t first;
  std::uint32_t last;
};

/// In order. Unicode's categories L and N.
std::span<const CodePoints> letters();
std::span<const CodePoints> numbers();

}  // namespace tessera::workloads::lm
