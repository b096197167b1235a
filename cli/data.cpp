// tessera data — converts, shows, checks and makes click logs.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <set>

#include <nlohmann/json.hpp>

#include "data/input.h"
#include "data/whole_file.h"
#include "data_answer.h"
#include "data_stats.h"
#include "data_table.h"
#include "dlrm/click_file.h"
#include "dlrm/criteo.h"
#include "dlrm/synthetic.h"
#include "flags.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

using workloads::dlrm::ClickFile;
using workloads::dlrm::ClickFileWriter;
using workloads::dlrm::CriteoOptions;
using workloads::dlrm::CriteoReport;
using workloads::dlrm::DataError;
using workloads::dlrm::Feature;
using workloads::dlrm::SampleBlock;
using workloads::dlrm::SyntheticLog;
using Json = nlohmann::ordered_json;

constexpr std::string_view kHelp =
    R"(tessera data schema|convert|show|check|stats|synth FILE... [flags]

  tessera data schema shop.csv --out shop.toml       guess what the columns are
  tessera data convert --schema shop.toml shop-*.csv.gz --out shop.click
  tessera data convert day_0.tsv --out day_0.click   Criteo's text, no schema
  tessera data convert day_*.gz --out days.click     several, packed, - a pipe
  tessera data show day_0.click                      samples, features, tables
  tessera data check day_0.click                     read all, compare sums
  tessera data check shop.csv --schema shop.toml     count and name bad lines
  tessera data stats day_0.click --write stats.json  ids of every feature
  tessera data synth clicks.click --samples 1000000  a log with a known best AUC

  --schema FILE         convert, check: columns of CSV, TSV, JSON lines, Parquet
                        or npz; several files, gzip, zstd, - for a pipe
  --out PATH, --to PATH convert, schema: the file to write
  --skip-bad            with a schema: leave bad lines out, not end there
  --no-label            with a schema: there is no label, as for predictions
  --strict              Criteo: the first bad line ends it, not left out
  --rows N or N,N,...   Criteo, synth: rows of all tables, or of each (100000)
  --half                convert, synth: dense numbers in 16 bits
  --threads N           Criteo: threads that parse (one per core it may use)
  --format binary|text  synth: what to write (binary)
  --samples N           synth: how many (100000)
  --features N          synth: how many sparse features (26)
  --bag N               synth: ids per bag, 0 for bags that vary (1)
  --seed N              synth: another log (1)
  --zipf X              synth: how steep the popularity of ids is (1.05)
  --json                one JSON object

Exit codes: 0 good, 2 wrong usage, 65 a file is damaged or missing.
More: docs/your_data.md, docs/dlrm.md
)";

struct DataWords {
  std::string to;
  std::string schema;
  bool skips_bad = false;
  bool has_no_label = false;
  std::string rows = "100000";
  std::string format = "binary";
  bool half = false;
  bool strict = false;
  int threads = 0;
  std::int64_t samples = 100000;
  std::int64_t features = 26;
  std::int64_t bag = 1;
  std::uint64_t seed = 1;
  double zipf = 1.05;
  bool wants_json = false;
  bool wants_help = false;
};

using Names = std::vector<std::string>;

const std::string& only_name(const Names& names, const std::string& action) {
  if (names.size() != 1) {
    throw UsageError("data: name one file, as in tessera data " + action + " FILE");
  }
  return names[0];
}

void define_flags(CLI::App& app, DataWords& words) {
  app.set_help_flag();
  app.add_option("--to,--out", words.to);
  app.add_option("--schema", words.schema);
  app.add_flag("--skip-bad", words.skips_bad);
  app.add_flag("--no-label", words.has_no_label);
  app.add_option("--rows", words.rows);
  app.add_option("--format", words.format);
  app.add_flag("--half", words.half);
  app.add_flag("--strict", words.strict);
  app.add_option("--threads", words.threads);
  app.add_option("--samples", words.samples);
  app.add_option("--features", words.features);
  app.add_option("--bag", words.bag);
  app.add_option("--seed", words.seed);
  app.add_option("--zipf", words.zipf);
  app.add_flag("--json", words.wants_json);
  app.add_flag("--help,-h", words.wants_help);
}

class Watch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// One number for all tables, or one for each.
std::vector<Feature> features_of(const DataWords& words, std::int64_t count, std::int64_t bag) {
  std::vector<std::int64_t> rows;
  std::string_view rest = words.rows;
  while (true) {
    const std::size_t end = std::min(rest.find(','), rest.size());
    const std::string word(rest.substr(0, end));
    const char* word_end = word.data() + word.size();
    std::int64_t number = 0;
    const auto [stop, error] = std::from_chars(word.data(), word_end, number);
    if (error != std::errc() || stop != word_end || number < 1) {
      throw UsageError("data: --rows is a number of rows or a list of them, not '" + words.rows +
                       "'");
    }
    rows.push_back(number);
    if (end == rest.size()) break;
    rest.remove_prefix(end + 1);
  }
  if (rows.size() != 1 && static_cast<std::int64_t>(rows.size()) != count) {
    throw UsageError("data: --rows lists " + std::to_string(rows.size()) + " tables, there are " +
                     std::to_string(count));
  }
  auto features = workloads::dlrm::equal_features(count, rows[0], bag);
  for (std::size_t i = 0; i < rows.size() && rows.size() > 1; ++i) features[i].num_rows = rows[i];
  return features;
}

CriteoOptions criteo_options(const DataWords& words) {
  CriteoOptions options;
  options.features = features_of(words, workloads::dlrm::kCriteoFeatures, 1);
  options.strict = words.strict;
  options.num_threads = words.threads;
  options.unpack = workloads::data::unpacking;
  return options;
}

DataAnswer answer_of(const CriteoReport& report, double seconds) {
  DataAnswer answer{.unit = "lines",
                    .num_read = report.num_lines,
                    .num_samples = report.num_samples,
                    .num_bad = report.num_bad,
                    .num_bytes = report.num_bytes,
                    .seconds = seconds};
  for (const CriteoReport::BadLine& bad : report.first_bad) {
    answer.first_bad.push_back(workloads::dlrm::place_of(bad) + " " + bad.reason);
    answer.bad_for_machines.push_back({{"line", bad.line}, {"reason", bad.reason}});
    if (!bad.file.empty()) answer.bad_for_machines.back()["file"] = bad.file;
  }
  return answer;
}

TableWords table_words(const DataWords& words) {
  return {words.schema,       words.to,   words.skips_bad,
          words.has_no_label, words.half, words.wants_json};
}

int convert(const Names& names, const DataWords& words) {
  if (words.to.empty()) throw UsageError("data: convert needs --out PATH");
  if (!words.schema.empty()) return convert_tables(names, table_words(words));
  const Names files = workloads::data::expand(names);
  workloads::data::check_apart(files, words.to);
  const Watch watch;
  const CriteoOptions options = criteo_options(words);
  ClickFileWriter writer(words.to, {workloads::dlrm::kCriteoDense, options.features},
                         {.half_dense = words.half});
  const CriteoReport report = workloads::dlrm::read_criteo(
      files, options, [&](const SampleBlock& samples) { writer.append(samples); });
  workloads::dlrm::check_has_samples(files, report);
  writer.finish();
  return say_converted(answer_of(report, watch.seconds()), words.to, words.wants_json);
}

const char* pooling_of(const Feature& feature) { return feature.means ? "mean" : "sum"; }

int show(const Names& names, const DataWords& words) {
  const std::string& path = only_name(names, "show");
  const ClickFile file(path);
  const auto& layout = file.layout();
  if (words.wants_json) {
    Json answer = {{"path", path},
                   {"version", layout.version},
                   {"samples", layout.num_samples},
                   {"bytes", file.num_bytes()},
                   {"dense", layout.schema.num_dense},
                   {"dense_bits", layout.half_dense ? 16 : 32},
                   {"blocks", layout.blocks.size()},
                   {"block_samples", layout.block_samples},
                   {"features", Json::array()}};
    for (const Feature& feature : layout.schema.features) {
      answer["features"].push_back(
          {{"name", feature.name}, {"rows", feature.num_rows}, {"bag_size", feature.bag_size}});
      if (layout.version > 1) answer["features"].back()["pooling"] = pooling_of(feature);
      if (feature.dim > 0) answer["features"].back()["dim"] = feature.dim;
      if (feature.grows()) answer["features"].back()["growing"] = true;
    }
    if (!layout.schema.dense_names.empty()) answer["dense_names"] = layout.schema.dense_names;
    if (!layout.schema.origin.empty()) answer["schema"] = layout.schema.origin;
    print(answer);
    return launch::kExitOk;
  }
  std::printf("samples  %lld in %zu blocks, %.1f MB\ndense    %lld numbers of %d bits\n",
              static_cast<long long>(layout.num_samples), layout.blocks.size(),
              static_cast<double>(file.num_bytes()) / 1e6,
              static_cast<long long>(layout.schema.num_dense), layout.half_dense ? 16 : 32);
  for (const Feature& feature : layout.schema.features) {
    const std::string bag =
        feature.bag_size == 0 ? "any number of" : std::to_string(feature.bag_size);
    const std::string rows =
        feature.grows() ? "     growing" : std::to_string(feature.num_rows) + " rows";
    const std::string dim =
        feature.dim > 0 ? ", " + std::to_string(feature.dim) + " columns" : std::string();
    std::printf("feature  %-24s %17s, %s ids per sample%s%s\n", feature.name.c_str(), rows.c_str(),
                bag.c_str(), feature.means ? ", mean" : "", dim.c_str());
  }
  return launch::kExitOk;
}

// A pipe keeps its first bytes for who reads it.
bool is_binary(const std::string& path) {
  namespace data = workloads::data;
  if (path == "-") return false;
  return data::content_of(data::front_of(path)).kind == data::FileKind::kClickLog;
}

int check_binary(const std::string& path, const DataWords& words) {
  const Watch watch;
  const ClickFile file(path);
  file.verify();
  if (file.num_samples() == 0) throw DataError(path + ": there is no sample in it.");
  const double seconds = watch.seconds();
  if (words.wants_json) {
    print({{"path", path},
           {"good", true},
           {"samples", file.num_samples()},
           {"bytes", file.num_bytes()},
           {"seconds", seconds}});
  } else {
    std::printf("good     %lld samples, %.1f MB in %.2f s\n",
                static_cast<long long>(file.num_samples()),
                static_cast<double>(file.num_bytes()) / 1e6, seconds);
  }
  return launch::kExitOk;
}

int check_text(const Names& names, const Names& files, const DataWords& words) {
  const Watch watch;
  const CriteoReport report =
      workloads::dlrm::read_criteo(files, criteo_options(words), [](const SampleBlock&) {});
  return say_checked(answer_of(report, watch.seconds()), names[0], words.wants_json);
}

int check(const Names& names, const DataWords& words) {
  if (!words.schema.empty()) return check_tables(names, table_words(words));
  const Names files = workloads::data::expand(names);
  for (const std::string& file : files) {
    if (!is_binary(file)) continue;
    if (files.size() == 1) return check_binary(file, words);
    throw UsageError("data: check reads one click log at a time, and " + file + " is one");
  }
  return check_text(names, files, words);
}

void write_binary(const std::string& path, const SyntheticLog& log, const DataWords& words) {
  constexpr std::int64_t kPart = 8192;
  ClickFileWriter writer(path, log.schema(), {.half_dense = words.half});
  SampleBlock samples;
  for (std::int64_t first = 0; first < words.samples; first += kPart) {
    log.read(first, std::min(kPart, words.samples - first), samples);
    writer.append(samples);
  }
  writer.finish();
}

void write_text(const std::string& path, const SyntheticLog& log, const DataWords& words) {
  constexpr std::int64_t kPart = 8192;
  workloads::data::WholeFile file(path);
  std::string text;
  for (std::int64_t first = 0; first < words.samples; first += kPart) {
    text.clear();
    workloads::dlrm::append_criteo_lines(log, first, std::min(kPart, words.samples - first), text);
    file.write(text);
  }
  file.finish();
}

int schema(const Names& names, const DataWords& words) {
  return guess_schema(only_name(names, "schema"), table_words(words));
}

int synth(const Names& names, const DataWords& words) {
  const std::string& path = only_name(names, "synth");
  if (words.samples < 1) throw UsageError("data: --samples is 1 or more");
  if (words.features < 1) throw UsageError("data: --features is 1 or more");
  if (words.format != "binary" && words.format != "text") {
    throw UsageError("data: --format is binary or text, not '" + words.format + "'");
  }
  workloads::dlrm::SyntheticOptions options;
  options.seed = words.seed;
  options.schema.features = features_of(words, words.features, words.bag);
  options.zipf_exponent = words.zipf;
  options.num_samples = words.samples;
  const Watch watch;
  const SyntheticLog log(options);
  if (words.format == "binary") {
    write_binary(path, log, words);
  } else {
    write_text(path, log, words);
  }
  const double seconds = watch.seconds();
  const auto ceiling = log.ceiling(std::min<std::int64_t>(words.samples, 1000000));
  if (words.wants_json) {
    print({{"path", path},
           {"samples", words.samples},
           {"seconds", seconds},
           {"ceiling",
            {{"auc", ceiling.auc},
             {"log_loss", ceiling.log_loss},
             {"normalised_entropy", ceiling.normalised_entropy},
             {"click_rate", ceiling.click_rate},
             {"samples", ceiling.num_samples}}}});
    return launch::kExitOk;
  }
  std::printf(
      "wrote %lld samples to %s in %.2f s\nceiling  auc %.4f, log loss %.4f, normalised entropy "
      "%.4f, click rate %.4f\n",
      static_cast<long long>(words.samples), path.c_str(), seconds, ceiling.auc, ceiling.log_loss,
      ceiling.normalised_entropy, ceiling.click_rate);
  return launch::kExitOk;
}

using Action = int (*)(const Names& names, const DataWords& words);

const std::map<std::string, Action>& actions() {
  static const std::map<std::string, Action> kActions = {
      {"check", check}, {"convert", convert}, {"schema", schema}, {"show", show}, {"synth", synth}};
  return kActions;
}

int run(const std::vector<std::string>& words) {
  CLI::App app("", "data");
  DataWords given;
  define_flags(app, given);
  if (words.empty()) throw UsageError("data: say what to do, as in tessera data show FILE");
  if (words[0] == "--help" || words[0] == "-h") return print_help(kHelp);
  if (words[0] == "stats") return data_stats({words.begin() + 1, words.end()});
  const auto action = actions().find(words[0]);
  if (action == actions().end()) {
    std::vector<std::string> known{"stats"};
    for (const auto& [name, function] : actions()) known.push_back(name);
    throw UsageError("data: there is no '" + words[0] + "'" + suggestion(words[0], known));
  }
  const std::vector<std::string> rest(words.begin() + 1, words.end());
  const NamesAndFlags split = names_and_flags(app, rest);
  read_flags(app, split.flags);
  if (given.wants_help) return print_help(kHelp);
  if (split.names.empty()) {
    throw UsageError("data: name a file, as in tessera data " + words[0] + " FILE");
  }
  try {
    return action->second(split.names, given);
  } catch (const DataError& error) {
    throw launch::LaunchError(launch::kExitData, "data: " + words[0] + " " + split.names[0],
                              error.what(), "tessera data --help shows what can be read");
  }
}

std::vector<std::string> flags() {
  CLI::App app("", "data");
  DataWords words;
  define_flags(app, words);
  std::set<std::string> all;
  for (std::string& flag : long_flags(app)) all.insert(std::move(flag));
  for (std::string& flag : data_stats_flags()) all.insert(std::move(flag));
  return {all.begin(), all.end()};
}

std::map<std::string, std::string> values() { return {{"--format", "binary text"}}; }

}  // namespace

const Verb kDataVerb{"data", "convert, show, check and make click logs", kHelp, run,
                     flags,  "schema convert show check stats synth",    values};

}  // namespace tessera::cli
