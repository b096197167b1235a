// lm/normal_form_tables.h — what characters are made of; made when the library is built.

#pragma once

#include <cstdint>
#include <span>

#include "lm/unicode_classes.h"

namespace tessera::workloads::lm {

/// A mark and its canonical combining class, which is not 0.
struct Mark {
  std::uint32_t point;
  std::uint8_t order;
};

/// A character taken apart as far as that goes.
struct Parts {
  std::uint32_t point;
  std::uint8_t count;
  std::uint32_t points[4];
};

struct Composition {
  std::uint32_t first;
  std::uint32_t second;
  std::uint32_t whole;
};

/// In order. Korean syllables, which follow a rule, are left out.
std::span<const Mark> marks();
std::span<const Parts> decompositions();
std::span<const Composition> compositions();
/// Marks, and characters that are written otherwise or may join with one before them.
std::span<const CodePoints> unsettled_points();

}  // namespace tessera::workloads::lm
