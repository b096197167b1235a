// dlrm/settings.h — what `tessera train dlrm` can be told. No LibTorch.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dlrm/click_log.h"
#include "trainer/settings.h"

namespace tessera::workloads::dlrm {

struct Settings : trainer::Settings {
  std::string sharding = "auto";
  std::string plan;
  std::string profile;  // of the machine: a file, "assume", or empty: the one that is kept
  std::string stats;    // of the ids
  std::string data = "synthetic";
  std::string schema;  // of `data` and `eval_data`, if these are tables and no logs
  std::int64_t num_tables = 26;
  std::int64_t num_rows = 100000;
  std::int64_t bag_size = 1;
  std::int64_t embedding_dim = 32;
  std::string bottom = "128,32";
  std::string top = "128,64,1";
  std::string interaction = "dot";
  double table_learning_rate = 0.05;  // the schedule scales it as the dense layers'
  std::string optimizer = "adagrad";  // of dense layers
  std::string table_optimizer = "rowwise_adagrad";
  std::string precision = "float32";  // bfloat16: dense layers compute in it
  std::int64_t eval_samples = 65536;
  std::string eval_data;         // another log to judge on; none: the end of `data`
  std::int64_t epochs = 0;       // times through the log, instead of num_steps
  bool shuffle = false;          // another order of samples in every epoch
  std::string ids = "rows";      // of the tables; "unlimited": any id, and tables that grow
  std::int64_t id_capacity = 0;  // of each table; 0: none
  std::string id_admission = "always";
  std::string id_eviction = "none";
  std::string id_default = "row";
  std::string strings = "hash";  // "check": a second hash of each text tells which share an id
  bool follow = false;           // the end of the file is not the end

  Settings();
  settings::Table table() override;
  void check() const override;
  bool reads_stdin() const override { return data == "-"; }
  /// Whether ids are any and tables grow.
  bool is_unlimited() const { return ids == "unlimited"; }
  bool checks_texts() const { return strings == "check"; }
  /// Whether samples come one after the other, from a pipe or a file that grows.
  bool is_stream() const { return data == "-" || follow; }
  /// Throws LaunchError if the samples have no dense numbers.
  static void check_numbers(const ClickSchema& schema);
  /// Throws LaunchError if a log of these features cannot be trained on so.
  void check_tables(const ClickSchema& schema) const;

 private:
  void check_ids() const;
  /// `who` lets tables grow, and names itself so.
  void check_growing(const std::string& who) const;
};

/// A list of widths, "128,32". Throws std::invalid_argument.
std::vector<std::int64_t> widths_of(const std::string& text);

}  // namespace tessera::workloads::dlrm
