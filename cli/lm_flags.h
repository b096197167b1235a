// cli/lm_flags.h — the flags of `tessera train lm`.
//
// `tessera` reads them to find mistakes before anything is started; `tessera-worker` reads them
// again.

#pragma once

#include <cstdint>
#include <string>

#include <CLI/CLI.hpp>

#include "flag_checks.h"
#include "resume_flags.h"

namespace tessera::cli {

struct TrainLmWords {
  int num_ranks = 1;
  int data_ranks = 0;   // 0: what the vocabulary's leave over
  int vocab_ranks = 0;  // 0: all
  std::string file;
  std::int64_t num_steps = 200;
  std::int64_t batch = 16;
  std::int64_t length = 128;
  std::int64_t num_layers = 4;
  std::int64_t num_heads = 4;
  std::int64_t width = 128;
  double learning_rate = 0.001;
  std::int64_t seed = 1;
  std::string save;
  std::string resume;
  std::int64_t checkpoint_every = 0;
  int keep = 2;
  bool as_json = false;
  bool print_config = false;
  bool wants_help = false;
};

inline void define_flags(CLI::App& app, TrainLmWords& words) {
  app.set_help_flag();
  const auto value = [&](const char* name, auto& target) {
    return app.add_option(name, target)->capture_default_str()->take_last();
  };
  value("-n,--ranks", words.num_ranks)->check(CLI::Range(1, 4096));
  value("--data-ranks", words.data_ranks)->check(CLI::Range(0, 4096));
  value("--vocab-ranks", words.vocab_ranks)->check(CLI::Range(0, 256));
  value("--file", words.file);
  value("--steps", words.num_steps)->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  value("--batch", words.batch)->check(CLI::Range(1, 1 << 20));
  value("--length", words.length)->check(CLI::Range(1, 1 << 20));
  value("--layers", words.num_layers)->check(CLI::Range(1, 128));
  value("--heads", words.num_heads)->check(CLI::Range(1, 128));
  value("--width", words.width)->check(CLI::Range(1, 1 << 16));
  value("--lr", words.learning_rate)->check(not_negative());
  value("--seed", words.seed)->check(not_negative())->check(seed_range());
  value("--checkpoint-every", words.checkpoint_every)
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  value("--keep", words.keep)->check(CLI::Range(0, 1000));
  value("--save", words.save)->configurable(false);
  value("--resume", words.resume)->configurable(false);
  app.add_flag("--json", words.as_json)->configurable(false);
  app.add_flag("--print-config", words.print_config)->configurable(false);
  app.add_flag("-h,--help", words.wants_help)->configurable(false);
  app.set_config("--config")->configurable(false);
  app.allow_config_extras(false);
}

}  // namespace tessera::cli
