#include "dlrm/settings.h"

#include <algorithm>
#include <filesystem>
#include <stdexcept>

#include "tessera/collision/id_policy.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::workloads::dlrm {
namespace {

constexpr const char* kHead =
    R"(tessera train dlrm [flags]

  tessera train dlrm --ranks 2                       a made-up click log with a known best AUC
  tessera train dlrm --ranks 4 --data day_0.tsv      Criteo's format, or a file of tessera data
  tessera train dlrm --resume runs/2026-11-15-1      go on after the newest checkpoint of a run

Trains DLRM: tables over all ranks, dense layers on each. Writes a run folder with report.html.
)";

// Of a configuration file.
constexpr const char* kIds = "ids";
constexpr std::int64_t kLarge = std::int64_t{1} << 40;

std::string wrong_with_widths(const std::string& text) {
  try {
    widths_of(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

template <class Read>
std::string wrong_with(const std::string& text, const Read& read) {
  try {
    read(text);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}
std::string wrong_with_admission(const std::string& text) {
  return wrong_with(text, collision::admission_of);
}
std::string wrong_with_eviction(const std::string& text) {
  return wrong_with(text, collision::eviction_of);
}

}  // namespace

std::vector<std::int64_t> widths_of(const std::string& text) {
  std::vector<std::int64_t> widths;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    const bool is_number = !word.empty() && word.size() <= 6 &&
                           word.find_first_not_of("0123456789") == std::string::npos;
    if (!is_number || std::stoll(word) == 0) {
      throw std::invalid_argument("'" + text + "' is not a list of widths such as 128,64,1");
    }
    widths.push_back(std::stoll(word));
    begin = end + 1;
  }
  return widths;
}

Settings::Settings() {
  num_steps = 300;
  batch = 2048;
  learning_rate = 0.05;
  eval_every = 100;
}

settings::Table Settings::table() {
  settings::Table table(kHead, "More: docs/train_your_own.md, docs/report.md\n");
  add_ranks(table);
  add_device(table);
  table.add("sharding", sharding, "S", "")
      .one_of({"auto", "balanced", "table_wise", "row_wise", "column_wise", "data_parallel"});
  table.add("plan", plan, "FILE", "the plan itself, as JSON");
  table.add("profile", profile, "FILE", "of tessera doctor, or assume");
  table.add("stats", stats, "FILE", "of tessera data stats").beside();
  table.group("data");
  table.add("data", data, "D", "synthetic, a file, or -").told();
  table.add("schema", schema, "FILE", "of CSV, Parquet, ...").told().beside();
  table.add("tables", num_tables, "N", "of synthetic data").range(1, 10000).fixed();
  table.add("rows", num_rows, "N", "each, or Criteo's").range(1, kLarge).fixed().beside();
  table.add("bag", bag_size, "N", "ids per feature").range(1, 1000).told();
  table.add("follow", follow, "", "wait at the file's end").told().beside();
  table.add("ids", ids, "I", "").one_of({"rows", "unlimited"}).fixed().section(kIds, "kind");
  table.add("id-default", id_default, "D", "unknown")
      .one_of({"row", "zero", "init"})
      .fixed()
      .section(kIds, "default")
      .beside();
  table.add("id-capacity", id_capacity, "N", "a table (0: all)")
      .range(0, kLarge)
      .shown("")
      .told()
      .section(kIds, "capacity");
  table.add("id-admission", id_admission, "A", "or freq:N, prob:P")
      .check(wrong_with_admission)
      .told()
      .section(kIds, "admission")
      .beside();
  table.add("id-eviction", id_eviction, "E", "or lfu, lru, distance-lfu, ttl:N")
      .check(wrong_with_eviction)
      .told()
      .section(kIds, "eviction");
  table.add("strings", strings, "S", "")
      .one_of({"hash", "check"})
      .section(kIds, "strings")
      .beside();
  table.group("model");
  table.add("dim", embedding_dim, "N", "width of embeddings").range(1, 4096).fixed();
  table.add("interaction", interaction, "I", "").one_of({"dot", "cross"}).fixed().beside();
  table.add("bottom", bottom, "W", "widths of layers").check(wrong_with_widths).fixed();
  table.add("top", top, "W", "").check(wrong_with_widths).fixed().beside();
  table.group("training");
  table.add("steps", num_steps, "N", "steps").range(0, kLarge);
  table.add("batch", batch, "N", "samples per rank and step").range(1, 1 << 24).beside();
  table.add("epochs", epochs, "N", "through the log, not --steps")
      .range(0, kLarge)
      .shown("")
      .told();
  table.add("shuffle", shuffle, "", "samples, anew every epoch").told().beside();
  table.add("optimizer", optimizer, "O", "dense").one_of({"sgd", "adagrad", "adam"}).fixed();
  table.add("lr", learning_rate, "X", "rate").not_negative().told().beside();
  table.add("table-optimizer", table_optimizer, "O", "")
      .one_of({"sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"})
      .fixed();
  table.add("table-lr", table_learning_rate, "X", "rate of tables").not_negative().told().beside();
  add_schedule(table);
  table.add("precision", precision, "P", "dense layers").one_of({"float32", "bfloat16"}).told();
  table.add("eval-every", eval_every, "N", "steps").range(0, kLarge);
  table.add("eval-samples", eval_samples, "N", "to judge").range(1, kLarge).told().beside();
  table.add("eval-data", eval_data, "FILE", "another log to judge on").told();
  table.add("patience", patience, "N", "evaluations not better")
      .range(0, kLarge)
      .shown("")
      .beside();
  add_checkpoints(table);
  table.add("seed", seed, "N", "of data and parameters")
      .not_negative()
      .range(0, std::int64_t{1} << 62)
      .fixed()
      .beside();
  add_publishing(table);
  add_output(table);
  return table;
}

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& why,
                         const std::string& advice) {
  throw launch::LaunchError(launch::kExitConfiguration, "train: " + what, why, advice);
}

}  // namespace

void Settings::check_growing(const std::string& who) const {
  if (!plan.empty()) {
    refuse(who + " does not go with --plan " + plan,
           "the plan is made for tables with a fixed number of rows",
           "leave --plan out; --sharding is row_wise or table_wise");
  }
  if (sharding != "auto" && sharding != "row_wise" && sharding != "table_wise") {
    refuse(who + " does not go with --sharding " + sharding,
           "rows of growing tables lie where the hash of their id says",
           "--sharding row_wise or table_wise");
  }
  if (!publish.empty() && !is_unlimited()) {
    refuse(who + " does not go with --publish",
           "fixed tables and tables that grow are not published together yet",
           "leave --publish out, or say --ids unlimited");
  }
  if (device != "cpu") {
    refuse(who + " does not go with --device " + device, "growing tables are on the CPU",
           "leave --device out");
  }
}

void Settings::check_numbers(const ClickSchema& schema) {
  if (schema.num_dense > 0) return;
  refuse("there are no dense numbers in the data",
         "the bottom layers of the model take one or more of every sample",
         "name a column of numbers under [[dense]] in the schema; one that is always 1 will do");
}

void Settings::check_tables(const ClickSchema& schema) const {
  check_numbers(schema);
  for (const Feature& feature : schema.features) {
    if (feature.grows() && !is_unlimited()) {
      check_growing("growing = true (feature '" + feature.name + "')");
    }
    if (feature.dim_or(embedding_dim) != embedding_dim && !publish.empty()) {
      refuse("--publish does not go with the " + std::to_string(feature.dim) +
                 " columns of feature '" + feature.name + "'",
             "a server's rows are as wide as the model, --dim " + std::to_string(embedding_dim) +
                 ": every step would change all of them",
             "leave --publish out and export checkpoints, or leave dim out of the schema");
    }
  }
}

void Settings::check_ids() const {
  const auto eviction = collision::eviction_of(id_eviction).kind;
  if (id_capacity == 0 && eviction != collision::EvictionKind::kNone &&
      eviction != collision::EvictionKind::kTimeToLive) {
    refuse("--id-eviction " + id_eviction + " needs --id-capacity",
           "ids go when a table is full, and without a capacity none ever is",
           "add --id-capacity N, or say --id-eviction ttl:N, which goes by age alone");
  }
  if (!is_unlimited()) {
    if (checks_texts()) {
      refuse("--strings check is for --ids unlimited",
             "fixed tables have fewer rows than there are texts, which share them anyway",
             "add --ids unlimited, or leave --strings out");
    }
    if (follow) {
      refuse("--follow is for --ids unlimited",
             "a stream is not looked through for its ids before it is trained on",
             "add --ids unlimited, or convert the log with tessera data convert");
    }
    if (data == "-" && schema.empty()) {
      refuse("--data - needs --schema", "standard input is read once, and nothing is guessed of it",
             "tessera data schema FILE --out log.toml makes one; Criteo's text: tessera data "
             "convert - --out FILE");
    }
    return;
  }
  check_growing("--ids unlimited");
  if (follow && data == "-") {
    refuse("--follow does not go with --data -", "a pipe ends when it is closed",
           "leave --follow out");
  }
  if (is_stream() && schema.empty() && data == "-") {
    refuse("--data - needs --schema", "a stream cannot be looked at twice",
           "make one with tessera data schema FILE --out log.toml");
  }
  if (is_stream() && (data == "synthetic" || shuffle || epochs > 1)) {
    refuse("a stream does not go with synthetic data, --shuffle or more than one epoch",
           "its samples come once, one after the other", "leave these flags out");
  }
  if (is_stream() && epochs > 0 && decay != "none") {
    refuse("--decay " + decay + " needs to know the last step",
           "a stream that is trained on to its end has none", "leave --decay out, or give --steps");
  }
}

void Settings::check() const {
  using launch::LaunchError;
  trainer::Settings::check();
  check_ids();
  const auto check_data = [this](const std::string& flag, const std::string& name) {
    if (std::filesystem::exists(name)) return;
    const bool is_pattern = name.find_first_of("*?[,") != std::string::npos;
    // What fits no file is told when it is read.
    if (is_pattern && (!schema.empty() || !is_unlimited())) return;
    throw LaunchError(launch::kExitData, "train: there is no file " + name,
                      is_pattern ? flag + " names it; with --ids unlimited, patterns and several " +
                                       "files are for tables, whose columns --schema explains"
                                 : flag + " names it",
                      is_pattern ? "tessera data schema FILE --out schema.toml makes a schema"
                                 : "name a file, or leave " + flag + " out");
  };
  if (data != "synthetic" && data != "-") check_data("--data", data);
  if (!eval_data.empty()) check_data("--eval-data", eval_data);
  if (!schema.empty() && !std::filesystem::exists(schema)) {
    throw LaunchError(launch::kExitData, "train: there is no file " + schema, "--schema names it",
                      "make one with tessera data schema FILE --out " + schema);
  }
  if (data == "synthetic" && (epochs > 0 || shuffle)) {
    throw LaunchError(launch::kExitConfiguration,
                      "train: --epochs and --shuffle are for a log with an end",
                      "synthetic data never ends, and never comes again",
                      "leave them out, or name a log with --data");
  }
  if (!plan.empty() && !std::filesystem::exists(plan)) {
    throw LaunchError(launch::kExitConfiguration, "train: there is no file " + plan,
                      "--plan names it", "name a file, or use --sharding");
  }
  if (!stats.empty() && !std::filesystem::exists(stats)) {
    throw LaunchError(launch::kExitData, "train: there is no file " + stats, "--stats names it",
                      "make it with tessera data stats --write, or leave --stats out");
  }
  const auto last_bottom = widths_of(bottom).back();
  const auto last_top = widths_of(top).back();
  if (last_bottom != embedding_dim || last_top != 1) {
    throw LaunchError(
        launch::kExitConfiguration,
        "train: --bottom ends with " + std::to_string(last_bottom) + " and --top with " +
            std::to_string(last_top) + ", --dim is " + std::to_string(embedding_dim),
        "the bottom layers end as wide as the embeddings, the top layers with one number",
        "let --bottom end with --dim, and --top with 1");
  }
}

}  // namespace tessera::workloads::dlrm
