// lm/settings.h — what `tessera train lm` can be told. No LibTorch.

#pragma once

#include <cstdint>
#include <string>

#include "trainer/settings.h"

namespace tessera::workloads::lm {

/// `batch` counts the sequences of all ranks.
struct Settings : trainer::Settings {
  int vocab_ranks_wanted = 0;  // 0: all ranks, unless data_ranks_wanted is given
  int data_ranks_wanted = 0;   // 0: what the vocabulary's leave over
  std::string file;            // empty: the library's own source text
  std::int64_t length = 128;
  std::int64_t num_layers = 4;
  std::int64_t num_heads = 4;
  std::int64_t width = 128;

  Settings();
  settings::Table table() override;
  void check() const override;
  std::int64_t data_ranks() const override { return 1; }
};

}  // namespace tessera::workloads::lm
