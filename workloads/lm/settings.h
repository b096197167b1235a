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
  std::string tokenizer;       // a tokenizer.json; empty: tokens are bytes
  std::string eval_file;       // a text to judge on; empty: the last tenth of `file`
  std::int64_t epochs = 0;     // through the text; 0: num_steps counts, of sequences drawn from it
  bool shuffle = false;        // its pieces, anew every epoch
  std::int64_t eval_batches = 8;
  std::int64_t sample = 0;  // tokens to write at every evaluation
  std::string prompt;       // how they begin
  double temperature = 0.8;
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
