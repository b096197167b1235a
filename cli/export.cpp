// tessera export — makes a package to serve out of a checkpoint.

#include <sys/stat.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <system_error>

#include <nlohmann/json.hpp>

#include "data/converted.h"
#include "data/input.h"
#include "dlrm/metrics.h"
#include "dlrm/open_log.h"
#include "flags.h"
#include "newest_checkpoint.h"
#include "report/run_folder.h"
#include "settings/config_file.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/reader.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "tessera/serving/model.h"
#include "tessera/serving/package.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

using checkpoint::Reader;
using embedding::RowType;
using Json = nlohmann::ordered_json;

constexpr std::string_view kHelp = R"(tessera export RUN|CHECKPOINTS PKG [flags]

  tessera export runs/2026-11-15-1 pkg                           int8 tables, ready to serve
  tessera export runs/a pkg --quantise int4 --table cat_0=fp16
  tessera export runs/a pkg --eval synthetic                     AUC before and after

Takes the newest checkpoint of tessera train dlrm and writes a package for tessera serve: tables
with rows in few bits, dense layers, names and sums. Says what rounding costs.

  --out PKG                 folder to write, if not named behind the run; a package that is there
                            is replaced in one step
  --step N                  which checkpoint (the newest)
  --quantise T, --dtype T   fp32, fp16, bf16, fp8, int8, int4 or int2 (int8)
  --table NAME=T            another type for one table; may be given again
  --output-dtype T          servers answer in fp32 or fp16 (fp32)
  --align N                 rows begin at multiples of 1, 4 or 16 bytes (4)
  --on-overflow W           numbers that the type cannot hold: error, clamp, or bf16 for the
                            whole table (error)
  --unknown zero            also runs whose unknown ids began with numbers of their own
  --features A,B,C          their order, for checkpoints that do not say
  --eval D                  judge on synthetic data, or on all samples of a file; of the log that
                            the run was trained on, on those that it kept to be judged on
  --eval-samples N          no more than so many, the last of them (65536 of synthetic data)
  --max-auc-drop X          fail with 65 if the AUC falls by more; what is there stays
  --json                    one JSON object

Exit codes: 0 good, 2 wrong usage, 65 a checkpoint cannot be used or the AUC falls too far.
More: docs/serving.md
)";

struct ExportWords {
  std::string out;
  std::int64_t step = -1;
  std::string dtype = "int8";
  std::string output_dtype = "fp32";
  std::vector<std::string> tables;
  std::int64_t alignment = 4;
  std::string on_overflow = "error";
  std::string unknown;
  std::string features;
  std::string eval;
  std::optional<std::int64_t> eval_samples;
  double max_auc_drop = -1;
  bool wants_json = false;
  bool wants_help = false;
};

void define_flags(CLI::App& app, ExportWords& words) {
  app.set_help_flag();
  app.add_option("--out,-o", words.out);
  app.add_option("--step", words.step);
  app.add_option("--quantise,--dtype", words.dtype);
  app.add_option("--output-dtype", words.output_dtype)->check(CLI::IsMember({"fp32", "fp16"}));
  app.add_option("--table", words.tables)->expected(1)->take_all();
  app.add_option("--align", words.alignment);
  app.add_option("--on-overflow", words.on_overflow);
  app.add_option("--unknown", words.unknown)->check(CLI::IsMember({"zero"}));
  app.add_option("--features", words.features);
  app.add_option("--eval", words.eval);
  app.add_option("--eval-samples", words.eval_samples);
  app.add_option("--max-auc-drop", words.max_auc_drop);
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

RowType type_of(const std::string& name) {
  const auto type = embedding::row_type_of(name);
  if (type) return *type;
  throw UsageError("export: unknown type '" + name + "'" +
                   suggestion(name, embedding::row_type_names()));
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size() && !text.empty();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

serving::ExportOptions options_of(const ExportWords& words) {
  serving::ExportOptions options;
  options.type = type_of(words.dtype);
  for (const std::string& word : words.tables) {
    const std::size_t equals = word.rfind('=');
    if (equals == std::string::npos || equals == 0) {
      throw UsageError("export: --table is NAME=TYPE, not '" + word + "'");
    }
    options.tables[word.substr(0, equals)] = type_of(word.substr(equals + 1));
  }
  if (words.alignment != 1 && words.alignment != 4 && words.alignment != 16) {
    throw UsageError("export: --align is 1, 4 or 16");
  }
  options.alignment = words.alignment;
  options.has_half_outputs = words.output_dtype == "fp16";
  if (words.on_overflow == "fp16") {
    throw UsageError(
        "export: --on-overflow fp16 would not help: a float16 holds no more than the "
        "65504 that a row's scale and bias do; say bf16");
  }
  if (words.on_overflow != "error" && words.on_overflow != "clamp" && words.on_overflow != "bf16") {
    throw UsageError("export: --on-overflow is error, clamp or bf16, not '" + words.on_overflow +
                     "'");
  }
  if (words.on_overflow == "clamp") options.on_overflow = serving::OnOverflow::kClamp;
  if (words.on_overflow == "bf16") options.on_overflow = serving::OnOverflow::kBf16;
  options.zeroes_unknown = words.unknown == "zero";
  options.features = split(words.features);
  return options;
}

// A run folder, a folder of checkpoints, or one of these.
std::unique_ptr<Reader> open_checkpoint(std::string path, std::int64_t step) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::filesystem::path given(path);
  if (step < 0 && checkpoint::step_of(given.filename().string()) >= 0) {
    step = checkpoint::step_of(given.filename().string());
    path = given.parent_path().empty() ? "." : given.parent_path().string();
  }
  return open_newest(root_of(path), step);
}

struct Figures {
  double auc = 0;
  double log_loss = 0;
  std::int64_t num_samples = 0;
};

workloads::dlrm::OpenedLog log_of(const Reader& reader, const serving::ModelInfo& model,
                                  const std::string& name) {
  workloads::dlrm::LogOptions options;
  options.num_tables = static_cast<std::int64_t>(model.features.size());
  options.num_rows = model.tables.front().num_rows;
  options.unpack = workloads::data::unpacking;
  options.files = workloads::data::files_of;
  const auto seed = reader.manifest().values.find("seed");
  if (seed != reader.manifest().values.end()) {
    options.seed = static_cast<std::uint64_t>(std::get<std::int64_t>(seed->second));
  }
  auto log = workloads::dlrm::open_log(name, options);
  const auto& schema = log.log->schema();
  bool fits =
      schema.num_dense == model.num_dense && schema.features.size() == model.features.size();
  for (std::size_t i = 0; fits && i < schema.features.size(); ++i) {
    fits = schema.features[i].name == model.features[i].name &&
           (model.tables[model.features[i].table].is_growing ||
            schema.features[i].num_rows <= model.tables[model.features[i].table].num_rows);
  }
  if (!fits) {
    throw workloads::dlrm::DataError(name + ": its features are not those of the model.");
  }
  return log;
}

constexpr std::int64_t kJudgedSamples = 65536;  // as the trainer, unless it is told

// Whether `name` may be a log that a run was trained on: one of its files, or what they were
// converted into. One that cannot be looked at, such as by a path from another folder, may be.
bool may_be_trained_on(const std::string& name, const std::string& data,
                       const std::string& schema) {
  namespace fs = std::filesystem;
  if (data.empty() || data == "synthetic" || data == "-") return false;
  try {
    for (const std::string& file : workloads::data::files_of(data)) {
      if (fs::equivalent(name, file)) return true;
    }
    if (schema.empty()) return false;
    const std::string log = workloads::data::converted_path(data, schema);
    return fs::exists(log) && fs::equivalent(name, log);
  } catch (const fs::filesystem_error&) {
    return true;
  } catch (const workloads::data::DataError&) {
    return true;
  }
}

// How many samples at the end of the log `name` the run of a checkpoint kept to be judged on, at
// most; nothing if that is another log than it was trained on, or it was trained on all of it.
std::optional<std::int64_t> kept_of_run(const Reader& reader, const std::string& name) {
  namespace fs = std::filesystem;
  const fs::path root = fs::absolute(reader.folder()).lexically_normal().parent_path();
  for (const fs::path& run : {root, root.parent_path()}) {
    const std::string file = (run / workloads::report::kConfigFile).string();
    if (!fs::is_regular_file(file)) continue;
    std::map<std::string, std::string> told;
    for (const auto& one :
         settings::settings_in("export", file, workloads::report::read_text(file))) {
      told[one.key] = one.value;
    }
    if (!told["eval-data"].empty()) break;
    if (!may_be_trained_on(name, told["data"], told["schema"])) break;
    const auto kept = told.find("eval-samples");
    return kept == told.end() ? kJudgedSamples : std::atoll(kept->second.c_str());
  }
  return std::nullopt;
}

struct Part {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

// As the trainer: what it judges on, and never trains on. Another log is judged whole.
Part part_of(const workloads::dlrm::ClickLog& log, const std::string& name, const Reader& reader,
             const std::optional<std::int64_t>& wanted) {
  const std::int64_t size = log.num_samples();
  if (size < 0) return {std::int64_t{1} << 40, wanted.value_or(kJudgedSamples)};
  const auto kept = kept_of_run(reader, name);
  const std::int64_t most = std::max<std::int64_t>(1, kept ? std::min(*kept, size / 10) : size);
  const std::int64_t count = std::min(wanted.value_or(most), most);
  return {size - count, count};
}

Figures judge(const std::string& package, const workloads::dlrm::ClickLog& log, const Part& part) {
  serving::Model model(package);
  auto lease = model.lease();
  const auto num_features = log.schema().features.size();
  workloads::dlrm::SampleBlock block;
  workloads::dlrm::ClickSums sums;
  std::vector<float> scores;
  std::vector<float> labels;
  std::vector<float> logits;
  for (std::int64_t begin = 0; begin < part.count; begin += 4096) {
    const std::int64_t some = std::min<std::int64_t>(4096, part.count - begin);
    log.read(part.first + begin, some, block);
    std::vector<serving::FeatureBags> features(num_features);
    std::size_t id = 0;
    for (std::size_t f = 0; f < num_features; ++f) {
      features[f].lengths =
          std::span(block.lengths)
              .subspan(f * static_cast<std::size_t>(some), static_cast<std::size_t>(some));
      std::size_t ids = 0;
      for (const std::int32_t length : features[f].lengths) ids += static_cast<std::size_t>(length);
      features[f].ids = std::span(block.ids).subspan(id, ids);
      id += ids;
    }
    logits.resize(static_cast<std::size_t>(some));
    lease.predict({some, block.dense, features}, logits);
    sums.add(logits, block.labels);
    scores.insert(scores.end(), logits.begin(), logits.end());
    labels.insert(labels.end(), block.labels.begin(), block.labels.end());
  }
  return {workloads::dlrm::exact_auc(scores, labels), sums.log_loss(), part.count};
}

std::string bytes_text(std::int64_t num_bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto amount = static_cast<double>(num_bytes);
  int unit = 0;
  for (; amount >= 1024 && unit < 4; ++unit) amount /= 1024;
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", amount, units[unit]);
  return text;
}

Json json_of(const serving::ExportReport& report, const std::string& out) {
  Json tables = Json::array();
  for (const auto& table : report.tables) {
    tables.push_back({{"name", table.table.name},
                      {"type", embedding::name_of(table.table.type)},
                      {"rows", table.table.num_rows},
                      {"columns", table.table.num_columns},
                      {"bytes_before", table.bytes_before},
                      {"bytes_after", table.bytes_after},
                      {"mean_error", table.mean_error},
                      {"worst_error", table.worst_error},
                      {"worst_row", table.worst_row},
                      {"constant_rows", table.num_constant},
                      {"clamped_rows", table.num_clamped},
                      {"growing", table.table.is_growing},
                      {"raised", table.is_raised}});
  }
  return {{"package", out},
          {"step", report.model.step},
          {"bytes_before", report.bytes_before},
          {"bytes_after", report.bytes_after},
          {"tables", tables}};
}

void print_tables(const serving::ExportReport& report) {
  std::printf("%-20s %-5s %10s %9s %9s  %-10s %-10s %s\n", "table", "type", "rows", "before",
              "after", "mean error", "worst", "at risk");
  for (const auto& table : report.tables) {
    const std::int64_t at_risk = table.num_constant + table.num_clamped;
    std::printf("%-20s %-5s %10lld %9s %9s  %-10.2e %-10.2e %lld\n", table.table.name.c_str(),
                std::string(embedding::name_of(table.table.type)).c_str(),
                static_cast<long long>(table.table.num_rows),
                bytes_text(table.bytes_before).c_str(), bytes_text(table.bytes_after).c_str(),
                table.mean_error, table.worst_error, static_cast<long long>(at_risk));
  }
}

void print_package(const serving::ExportReport& report, const std::string& out) {
  std::printf("package  %s: step %lld, %s of %s (%.3f)\n", out.c_str(),
              static_cast<long long>(report.model.step), bytes_text(report.bytes_after).c_str(),
              bytes_text(report.bytes_before).c_str(),
              static_cast<double>(report.bytes_after) / static_cast<double>(report.bytes_before));
}

// What a package is worth, beside the model as it was trained.
struct Judgement {
  Figures before;
  Figures after;

  double drop() const { return before.auc - after.auc; }
};

Json json_of(const Judgement& judged) {
  return {{"samples", judged.after.num_samples},
          {"auc_before", judged.before.auc},
          {"auc_after", judged.after.auc},
          {"log_loss_before", judged.before.log_loss},
          {"log_loss_after", judged.after.log_loss}};
}

void print_judgement(const Judgement& judged) {
  std::printf("judged   auc %.5f -> %.5f, log loss %.5f -> %.5f on %lld samples\n",
              judged.before.auc, judged.after.auc, judged.before.log_loss, judged.after.log_loss,
              static_cast<long long>(judged.after.num_samples));
}

// The package once more with rows as they were trained, for as long as it is judged; in `scratch`,
// which is nobody else's.
Figures judge_unrounded(const Reader& reader, const serving::ExportOptions& options,
                        const std::string& scratch, const workloads::dlrm::ClickLog& log,
                        const Part& part) {
  serving::ExportOptions plain = options;
  plain.type = RowType::kFp32;
  plain.tables.clear();
  const std::string folder = scratch + "/unrounded";
  struct Removal {
    const std::string& folder;
    ~Removal() { checkpoint::remove_folder(folder, checkpoint::Disk::real()); }
  };
  serving::write_package(reader, folder, plain);
  const Removal removal{folder};
  return judge(folder, log, part);
}

int run_export(const std::string& path, const ExportWords& words) {
  std::string out = words.out;
  while (out.size() > 1 && out.back() == '/') out.pop_back();
  const serving::ExportOptions options = options_of(words);
  if (!words.eval.empty()) {
    // A package that is replaced takes along what lies in it.
    const auto folder = std::filesystem::path(words.eval).parent_path();
    workloads::data::check_apart({folder.empty() ? "." : folder.string()}, out);
  }
  const auto reader = open_checkpoint(path, words.step);
  std::optional<Judgement> judged;
  const auto tell = [&](const serving::ExportReport& report, bool is_in_place) {
    if (words.wants_json) {
      Json answer = json_of(report, out);
      if (!is_in_place) answer["package"] = nullptr;
      if (judged) answer["judged"] = json_of(*judged);
      std::printf("%s\n", answer.dump(2).c_str());
      return;
    }
    print_tables(report);
    if (is_in_place) print_package(report, out);
    if (judged) print_judgement(*judged);
  };
  // Before the package takes the place of one that may be better.
  serving::PackageJudge judge_package;
  if (!words.eval.empty()) {
    judge_package = [&](const std::string& folder, const serving::ExportReport& report) {
      const auto log = log_of(*reader, report.model, words.eval);
      const Part part = part_of(*log.log, words.eval, *reader, words.eval_samples);
      judged = {judge_unrounded(*reader, options, folder, *log.log, part),
                judge(folder, *log.log, part)};
      if (words.max_auc_drop < 0 || judged->drop() <= words.max_auc_drop) return;
      tell(report, false);
      char why[96];
      std::snprintf(why, sizeof(why), "the AUC falls by %.5f; --max-auc-drop allows %.5f",
                    judged->drop(), words.max_auc_drop);
      throw launch::LaunchError(launch::kExitData,
                                "export: the package is not good enough; " + out + " is as it was",
                                why, "store rows in more bits, or only some tables in few");
    };
  }
  tell(serving::write_package(*reader, out, options, judge_package), true);
  return launch::kExitOk;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "export");
  ExportWords given;
  define_flags(app, given);
  const auto [names, flags] = names_and_flags(app, words);
  read_flags(app, flags);
  if (given.wants_help) return print_help(kHelp);
  if (names.empty() || names.size() > 2) {
    throw UsageError("export: name one run or checkpoint, as in tessera export runs/a pkg");
  }
  if (names.size() == 2) {
    if (!given.out.empty()) {
      throw UsageError("export: the package is named twice, '" + names[1] + "' and --out " +
                       given.out);
    }
    given.out = names[1];
  }
  if (given.out.empty()) {
    throw UsageError("export: name the package to write, as in tessera export runs/a pkg");
  }
  if (given.max_auc_drop >= 0 && given.eval.empty()) {
    throw UsageError("export: --max-auc-drop needs --eval");
  }
  if (given.eval_samples.value_or(1) < 1) throw UsageError("export: --eval-samples is 1 or more");
  try {
    return run_export(names[0], given);
  } catch (const checkpoint::Error& error) {
    throw launch::LaunchError(launch::kExitData, "export: " + names[0], error.what(),
                              "tessera ckpt ls shows what is in a folder of checkpoints");
  } catch (const workloads::dlrm::DataError& error) {
    throw launch::LaunchError(launch::kExitData, "export: --eval " + given.eval, error.what(),
                              "name the data that the model was trained for");
  }
}

std::vector<std::string> flags() {
  CLI::App app("", "export");
  ExportWords words;
  define_flags(app, words);
  return long_flags(app);
}

std::map<std::string, std::string> values() {
  return {{"--dtype", "fp32 fp16 bf16 fp8 int8 int4 int2"},
          {"--quantise", "fp32 fp16 bf16 fp8 int8 int4 int2"},
          {"--output-dtype", "fp32 fp16"},
          {"--on-overflow", "error clamp bf16"},
          {"--align", "1 4 16"},
          {"--eval", "synthetic"}};
}

}  // namespace

const Verb kExportVerb{
    "export", "make a package to serve out of a checkpoint", kHelp, run, flags, "", values};

}  // namespace tessera::cli
