// cli/dlrm_flags.h — the flags of `tessera train dlrm`.
//
// `tessera` reads them to find mistakes before anything is started; `tessera-worker` reads them
// again.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "flag_checks.h"
#include "resume_flags.h"

namespace tessera::cli {

struct TrainDlrmWords {
  int num_ranks = 1;
  std::string sharding = "auto";
  std::string plan;
  std::string data = "synthetic";
  std::int64_t num_tables = 26;
  std::int64_t num_rows = 100000;
  std::int64_t bag_size = 1;
  std::int64_t embedding_dim = 32;
  std::string bottom = "128,32";
  std::string top = "128,64,1";
  std::string interaction = "dot";
  std::int64_t batch = 2048;
  std::int64_t num_steps = 300;
  double learning_rate = 0.05;
  double table_learning_rate = 0.05;
  std::string optimizer = "adagrad";
  std::string table_optimizer = "rowwise_adagrad";
  std::int64_t warmup = 0;
  std::string decay = "none";
  std::string precision = "float32";
  std::int64_t eval_every = 100;
  std::int64_t eval_samples = 65536;
  std::int64_t checkpoint_every = 0;
  int keep = 2;
  std::string runs = "runs";
  std::string resume;
  std::int64_t seed = 1;
  bool as_json = false;
  bool print_config = false;
  bool wants_help = false;
};

/// A list of widths, "128,32". Throws CLI::ValidationError.
inline std::vector<std::int64_t> widths_of(const std::string& text) {
  std::vector<std::int64_t> widths;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool is_number = !word.empty() && word.size() <= 6 &&
                           word.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number || std::stoll(word) == 0) {
      throw CLI::ValidationError("'" + text + "' is not a list of widths such as 128,64,1");
    }
    widths.push_back(std::stoll(word));
    begin = end + 1;
  }
  return widths;
}

inline void define_flags(CLI::App& app, TrainDlrmWords& words) {
  app.set_help_flag();
  const auto value = [&](const char* name, auto& target) {
    return app.add_option(name, target)->capture_default_str()->take_last();
  };
  const auto large = CLI::Range(std::int64_t{0}, std::int64_t{1} << 40);
  const auto positive = CLI::Range(std::int64_t{1}, std::int64_t{1} << 40);
  const CLI::Validator widths(
      [](std::string& text) {
        try {
          widths_of(text);
        } catch (const CLI::ValidationError& error) {
          return std::string(error.what());
        }
        return std::string();
      },
      "WIDTHS");
  value("-n,--ranks", words.num_ranks)->check(CLI::Range(1, 4096));
  value("--sharding", words.sharding)
      ->check(CLI::IsMember({"auto", "table_wise", "row_wise", "column_wise", "data_parallel"}));
  value("--plan", words.plan);
  value("--data", words.data);
  value("--tables", words.num_tables)->check(CLI::Range(1, 10000));
  value("--rows", words.num_rows)->check(positive);
  value("--bag", words.bag_size)->check(CLI::Range(1, 1000));
  value("--dim", words.embedding_dim)->check(CLI::Range(1, 4096));
  value("--bottom", words.bottom)->check(widths);
  value("--top", words.top)->check(widths);
  value("--interaction", words.interaction)->check(CLI::IsMember({"dot", "cross"}));
  value("--batch", words.batch)->check(CLI::Range(1, 1 << 24));
  value("--steps", words.num_steps)->check(large);
  value("--lr", words.learning_rate)->check(not_negative());
  value("--table-lr", words.table_learning_rate)->check(not_negative());
  value("--optimizer", words.optimizer)->check(CLI::IsMember({"sgd", "adagrad", "adam"}));
  value("--table-optimizer", words.table_optimizer)
      ->check(CLI::IsMember({"sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"}));
  value("--warmup", words.warmup)->check(large);
  value("--decay", words.decay)->check(CLI::IsMember({"none", "linear", "cosine"}));
  value("--precision", words.precision)->check(CLI::IsMember({"float32", "bfloat16"}));
  value("--eval-every", words.eval_every)->check(large);
  value("--eval-samples", words.eval_samples)->check(positive);
  value("--checkpoint-every", words.checkpoint_every)->check(large);
  value("--keep", words.keep)->check(CLI::Range(0, 1000));
  value("--runs", words.runs);
  value("--seed", words.seed)->check(not_negative())->check(seed_range());
  value("--resume", words.resume)->configurable(false);
  app.add_flag("--json", words.as_json)->configurable(false);
  app.add_flag("--print-config", words.print_config)->configurable(false);
  app.add_flag("-h,--help", words.wants_help)->configurable(false);
  app.set_config("--config")->configurable(false);
  app.allow_config_extras(false);
}

}  // namespace tessera::cli
