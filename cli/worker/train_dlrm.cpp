// tessera-worker train-dlrm — one rank of `tessera train dlrm`.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <thread>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "../dlrm_flags.h"
#include "dlrm/open_log.h"
#include "dlrm/training.h"
#include "report/html.h"
#include "report/page.h"
#include "report/rank_log.h"
#include "tessera/checkpoint/error.h"
#include "tessera/comm/failure.h"
#include "tessera/core/version.h"
#include "worker/dlrm_words.h"
#include "worker/progress_line.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

namespace report = workloads::report;
namespace dlrm = workloads::dlrm;
using Json = nlohmann::ordered_json;

constexpr int kDiverged = 1;
constexpr int kBadData = 65;
constexpr int kBadConfiguration = 78;

std::atomic<bool> is_told_to_stop{false};

dlrm::TrainingOptions options_of(const TrainDlrmWords& words, const std::string& folder) {
  dlrm::TrainingOptions options;
  options.model.embedding_dim = words.embedding_dim;
  options.model.bottom = widths_of(words.bottom);
  options.model.top = widths_of(words.top);
  options.model.interaction =
      words.interaction == "cross" ? dlrm::Interaction::kCross : dlrm::Interaction::kDot;
  options.batch = words.batch;
  options.num_steps = words.num_steps;
  options.learning_rate = words.learning_rate;
  options.table_learning_rate = words.table_learning_rate;
  options.optimizer = words.optimizer;
  options.table_optimizer = table_optimizer_of(words.table_optimizer);
  options.warmup_steps = words.warmup;
  options.decay = words.decay;
  options.bfloat16 = words.precision == "bfloat16";
  options.eval_every = words.eval_every;
  options.eval_samples = words.eval_samples;
  options.checkpoint_every = words.checkpoint_every;
  options.keep_checkpoints = words.keep;
  options.checkpoints = folder + "/checkpoints";
  options.resume = !words.resume.empty();
  options.seed = static_cast<std::uint64_t>(words.seed);
  return options;
}

Json table_line(const embedding::EmbeddingTableConfig& table,
                const sharding::ParameterSharding& sharding) {
  Json shards = Json::array();
  for (const sharding::Shard& shard : sharding.shards) {
    shards.push_back({{"rank", shard.rank},
                      {"row", shard.row},
                      {"rows", shard.rows},
                      {"column", shard.column},
                      {"columns", shard.columns},
                      {"bytes", 4 * shard.rows * shard.columns}});
  }
  return {{"kind", "table"},
          {"name", table.name},
          {"rows", table.num_embeddings},
          {"columns", table.embedding_dim},
          {"bytes", 4 * table.num_embeddings * table.embedding_dim},
          {"sharding", sharding::name_of(sharding.type)},
          {"shards", shards}};
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &parts);
  return text;
}

/// What rank 0 tells: lines on the terminal, and metrics.jsonl.
class Speaker {
 public:
  Speaker(const TrainDlrmWords& words, const comm::Group& world, std::string folder)
      : words_(words), world_(world), folder_(std::move(folder)), line_(words.num_steps) {}

  void introduce(const dlrm::OpenedLog& log,
                 const std::vector<embedding::EmbeddingTableConfig>& tables,
                 const sharding::ModulePlan& plan) {
    const auto bytes = dlrm::bytes_per_rank(plan, world_.size());
    double total = 0;
    double largest = 0;
    for (const double one : bytes) total += one;
    for (const auto& table : tables) {
      largest = std::max(largest, 4.0 * static_cast<double>(table.num_embeddings) *
                                      static_cast<double>(table.embedding_dim));
    }
    const double imbalance =
        *std::max_element(bytes.begin(), bytes.end()) * world_.size() / std::max(total, 1.0);
    char head[160];
    std::snprintf(head, sizeof(head), "tables   %zu on %d ranks, largest %s, imbalance %.2f\n",
                  tables.size(), world_.size(), report::bytes_text(largest).c_str(), imbalance);
    say(log.notes);
    say(head);
    say(sharding::ShardingPlan{{{kModule, plan}}}.str(100));
    write_head(log, tables, plan);
  }

  void start(std::int64_t first_step) {
    first_step_ = first_step;
    begin_ = std::chrono::steady_clock::now();
    const std::string path = folder_ + "/" + report::kMetricsFile;
    metrics_ = std::make_unique<report::MetricsFile>(path, first_step);
    if (first_step == 0) {
      for (const Json& line : head_) metrics_->add(line);
      if (!words_.resume.empty()) {
        say("resumed  at the beginning: " + words_.resume + " has no checkpoint\n");
      }
    } else {
      say("resumed  at step " + std::to_string(first_step) + "\n");
    }
  }

  void step(const dlrm::Progress& progress) {
    const double seconds = progress.time.seconds;
    const double exposed = progress.time.exposed_comm_seconds();
    const auto samples = static_cast<double>(progress.samples);
    total_samples_ += samples;
    metrics_->add({{"kind", "step"},
                   {"step", progress.step},
                   {"loss", progress.loss},
                   {"seconds", seconds},
                   {"samples_per_second", samples / seconds},
                   {"learning_rate", progress.learning_rate},
                   {"exposed_comm_seconds", exposed}});
    const bool is_first = mean_seconds_ == 0;
    mean_seconds_ = is_first ? seconds : 0.9 * mean_seconds_ + 0.1 * seconds;
    // Of all ranks; at first, when that is not known, of this one.
    const bool knows_others = progress.step > first_step_ + 1;
    const double waited = knows_others ? progress.mean_exposed : exposed;
    mean_exposed_ = is_first ? waited : 0.9 * mean_exposed_ + 0.1 * waited;
    if (words_.as_json || !line_.is_due(progress.step)) return;
    line_.show(progress.step, text_of(progress));
  }

  void evaluation(const dlrm::Evaluation& evaluation) {
    auc_ = evaluation.auc;
    metrics_->add({{"kind", "eval"},
                   {"step", evaluation.step},
                   {"log_loss", evaluation.log_loss},
                   {"auc", evaluation.auc},
                   {"normalized_entropy", evaluation.normalised_entropy},
                   {"calibration", evaluation.calibration},
                   {"samples", evaluation.samples}});
  }

  void finish(const dlrm::Summary& summary, const std::vector<std::string>& memory) {
    std::vector<std::int64_t> peaks;
    for (const std::string& text : memory) peaks.push_back(std::stoll(text));
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    metrics_->add({{"kind", "end"},
                   {"steps", summary.last_step},
                   {"seconds", seconds},
                   {"samples", total_samples_},
                   {"peak_memory_bytes", peaks}});
    const std::string page = report::write_report(folder_);
    if (summary.has_diverged) complain(summary);
    if (words_.as_json) {
      say_json(summary, page, seconds);
      return;
    }
    if (summary.was_stopped) {
      say("stopped  at step " + std::to_string(summary.last_step) +
          "; go on with tessera train dlrm --resume " + folder_ + "\n");
    } else if (summary.evaluation && !summary.has_diverged) {
      char text[160];
      std::snprintf(text, sizeof(text), "judged   log loss %.4f | auc %.4f%s\n",
                    summary.evaluation->log_loss, summary.evaluation->auc, ceiling_text().c_str());
      say(text);
    }
    say("report   " + page + "\n");
  }

  report::MetricsFile* metrics() { return metrics_.get(); }

 private:
  void say(const std::string& text) const {
    if (words_.as_json) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  }

  void say_json(const dlrm::Summary& summary, const std::string& page, double seconds) const {
    char fingerprint[32];
    std::snprintf(fingerprint, sizeof(fingerprint), "%016lx",
                  static_cast<unsigned long>(summary.fingerprint));
    Json json{
        {"workload", "dlrm"},         {"ranks", world_.size()}, {"first_step", summary.first_step},
        {"steps", summary.last_step}, {"loss", summary.loss},   {"seconds", seconds},
        {"fingerprint", fingerprint}, {"report", page}};
    if (summary.evaluation) {
      json["log_loss"] = summary.evaluation->log_loss;
      json["auc"] = summary.evaluation->auc;
    }
    if (ceiling_) json["auc_ceiling"] = *ceiling_;
    std::printf("%s\n", json.dump().c_str());
  }

  void complain(const dlrm::Summary& summary) const {
    // In one line, which the launcher shows as the reason.
    std::fprintf(stderr,
                 "error: train: the loss is not a number at step %ld of %ld: with --lr %g and "
                 "--table-lr %g the parameters have grown out of all bounds. Use smaller rates, or "
                 "--warmup; checkpoints of earlier steps are untouched.\n",
                 static_cast<long>(summary.last_step), static_cast<long>(words_.num_steps),
                 words_.learning_rate, words_.table_learning_rate);
  }

  std::string ceiling_text() const {
    char text[64] = "";
    if (ceiling_ && std::isfinite(*ceiling_))
      std::snprintf(text, sizeof(text), ", best possible %.4f", *ceiling_);
    return text;
  }

  std::string text_of(const dlrm::Progress& progress) const {
    const auto left = static_cast<double>(words_.num_steps - progress.step);
    const auto eta = static_cast<long>(std::lround(left * mean_seconds_));
    char time[32];
    if (eta < 60) {
      std::snprintf(time, sizeof(time), "%lds", eta);
    } else {
      std::snprintf(time, sizeof(time), "%ldm%02lds", eta / 60, eta % 60);
    }
    char text[200];
    std::snprintf(
        text, sizeof(text),
        "step %5ld/%ld | loss %.4f | auc %.3f | %s samples/s | %.1f ms (exposed comm "
        "%.1f) | mem %s | eta %s",
        static_cast<long>(progress.step), static_cast<long>(words_.num_steps), progress.loss,
        std::isfinite(auc_) ? auc_ : progress.auc,
        report::short_number(static_cast<double>(progress.samples) / mean_seconds_).c_str(),
        1e3 * mean_seconds_, 1e3 * mean_exposed_,
        report::bytes_text(static_cast<double>(report::peak_memory_bytes())).c_str(), time);
    return text;
  }

  void write_head(const dlrm::OpenedLog& log,
                  const std::vector<embedding::EmbeddingTableConfig>& tables,
                  const sharding::ModulePlan& plan) {
    char host[256] = "";
    gethostname(host, sizeof(host) - 1);
    Json head{
        {"kind", "run"}, {"workload", "dlrm"}, {"ranks", world_.size()}, {"started", now_text()}};
    if (log.synthetic) {
      ceiling_ = log.synthetic->ceiling(words_.eval_samples, std::int64_t{1} << 40).auc;
      head["auc_ceiling"] = *ceiling_;
    }
    head["versions"] = {{"tessera", version()}, {"LibTorch", torch_version()}};
    head["machine"] = {{"host", host},
                       {"cores", std::thread::hardware_concurrency()},
                       {"threads per rank", at::get_num_threads()},
                       {"engine", world_.engine()}};
    head_.push_back(head);
    for (const auto& table : tables) head_.push_back(table_line(table, plan.at(table.name)));
  }

  const TrainDlrmWords& words_;
  comm::Group world_;
  std::string folder_;
  ProgressLine line_;
  std::vector<Json> head_;
  std::unique_ptr<report::MetricsFile> metrics_;
  std::optional<double> ceiling_;
  std::int64_t first_step_ = 0;
  std::chrono::steady_clock::time_point begin_;
  double total_samples_ = 0;
  double mean_seconds_ = 0;
  double mean_exposed_ = 0;
  double auc_ = std::numeric_limits<double>::quiet_NaN();
};

// Rank 0 makes the folder; all know its name.
std::string run_folder(const TrainDlrmWords& words, const std::string& config,
                       const comm::Group& world) {
  std::string mine;
  if (world.rank() == 0) {
    mine = words.resume.empty() ? report::make_run_folder(words.runs) : words.resume;
    if (words.resume.empty()) report::write_text(mine + "/" + report::kConfigFile, config);
  }
  return report::gather_texts(mine, world)[0];
}

int train(const TrainDlrmWords& words, const std::string& config, const comm::Group& world) {
  const auto num_cores = static_cast<int>(std::thread::hardware_concurrency());
  at::set_num_threads(std::max(1, num_cores / world.size()));
  const dlrm::OpenedLog log = dlrm::open_log(words.data, log_options(words));
  const auto tables = dlrm::tables_of(log.log->schema(), words.embedding_dim);
  const sharding::ModulePlan plan = plan_of("train", words, tables, {world.size(), world.size()});
  const std::string folder = run_folder(words, config, world);
  std::unique_ptr<Speaker> speaker;
  if (world.rank() == 0) {
    speaker = std::make_unique<Speaker>(words, world, folder);
    speaker->introduce(log, tables, plan);
  }
  dlrm::Listener listener;
  if (speaker) {
    listener.started = [&](std::int64_t step) { speaker->start(step); };
    listener.stepped = [&](const dlrm::Progress& progress) { speaker->step(progress); };
    listener.evaluated = [&](const dlrm::Evaluation& one) { speaker->evaluation(one); };
  }
  // Steps of the middle: the first ones fill caches and pools.
  core::StepRecorder recorder({.first_kept = words.num_steps / 2, .num_kept = 3});
  const dlrm::Summary summary =
      dlrm::train(options_of(words, folder), log.log, plan, world, recorder, listener,
                  [] { return is_told_to_stop.load(); });
  report::write_times(folder, recorder, world, speaker ? speaker->metrics() : nullptr);
  const auto memory = report::gather_texts(std::to_string(report::peak_memory_bytes()), world);
  if (speaker) speaker->finish(summary, memory);
  // One rank says so; the others have nothing to add.
  return summary.has_diverged && speaker ? kDiverged : 0;
}

int train_dlrm(const std::vector<std::string>& words) {
  CLI::App app("", "train-dlrm");
  TrainDlrmWords given;
  define_flags(app, given);
  std::vector<std::string> flags = with_resumed_config(words);
  std::reverse(flags.begin(), flags.end());
  app.parse(flags);
  std::signal(SIGTERM, [](int) { is_told_to_stop = true; });
  std::signal(SIGINT, [](int) { is_told_to_stop = true; });
  const comm::Group world = comm::init();
  // The same mistake on all ranks: one says so.
  const auto fail = [&](const char* text, int code) {
    if (world.rank() == 0) std::fprintf(stderr, "error: %s\n", text);
    return code;
  };
  try {
    return comm::guarded([&] { return train(given, app.config_to_str(true, false), world); });
  } catch (const dlrm::DataError& error) {
    return fail(error.what(), kBadData);
  } catch (const report::Error& error) {
    return fail(error.what(), kBadData);
  } catch (const checkpoint::Error& error) {
    return fail(error.what(), kBadData);
  } catch (const c10::ValueError& error) {
    return fail(error.what_without_backtrace(), kBadConfiguration);
  }
}

}  // namespace

const WorkerVerb kTrainDlrmVerb{"train-dlrm", train_dlrm};

}  // namespace tessera::cli
