#include "dlrm/training.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <span>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <nlohmann/json.hpp>

#include "data/converted.h"
#include "data/input.h"
#include "dlrm/batch.h"
#include "dlrm/growing.h"
#include "dlrm/metrics.h"
#include "dlrm/model.h"
#include "dlrm/training_data.h"
#include "dlrm/training_tables.h"
#include "dlrm/trial.h"
#include "report/html.h"
#include "tessera/checkpoint/growing_tables.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"
#include "trainer/device.h"
#include "trainer/host_copy.h"
#include "trainer/run.h"
#include "trainer/train.h"

namespace tessera::workloads::dlrm {
namespace {

using core::Phase;
using core::Span;
using Json = nlohmann::ordered_json;
using pipeline::SparseInputs;
using sharding::ShardedEmbeddingBagCollection;

// Predictions of so many steps make the running AUC.
constexpr std::int64_t kAucWindow = 50;

// Points of the calibration curve.
constexpr std::size_t kCalibrationParts = 20;

// Times of so many steps make the measured one.
constexpr std::size_t kTimedSteps = 1000;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool has_nan(const at::Tensor& tensor) { return at::isnan(tensor).any().item<bool>(); }

std::span<const float> floats(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

// Dense layers compute in bfloat16 while it lives.
class Autocast {
 public:
  Autocast(bool is_on, at::DeviceType device) : is_on_(is_on), device_(device) {
    if (!is_on_) return;
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::set_autocast_dtype(device_, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!is_on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool is_on_;
  at::DeviceType device_;
};

DlrmOptions model_options(const Settings& settings, const ClickSchema& schema) {
  DlrmOptions model;
  model.num_dense = schema.num_dense;
  for (const Feature& feature : schema.features) {
    model.features.push_back(feature.name);
    model.dims.push_back(feature.dim_or(settings.embedding_dim));
  }
  model.embedding_dim = settings.embedding_dim;
  model.bottom = widths_of(settings.bottom);
  model.top = widths_of(settings.top);
  model.interaction = settings.interaction == "cross" ? Interaction::kCross : Interaction::kDot;
  model.seed = static_cast<std::uint64_t>(settings.seed);
  return model;
}

std::shared_ptr<Dlrm> make_model(const Settings& settings, const ClickSchema& schema) {
  auto model = std::make_shared<Dlrm>(model_options(settings, schema));
  model->to(trainer::device_of(settings));
  return model;
}

class Training final : public trainer::Workload<ClickBatch> {
 public:
  Training(const Settings& settings, TrainingData data, Purpose purpose,
           std::vector<embedding::EmbeddingTableConfig> configs, LaidTables laid,
           const comm::Group& group)
      : settings_(settings),
        group_(group),
        ranges_(ranges_of(settings, data, group, purpose)),
        log_(std::move(data.log)),
        texts_(std::move(data.texts)),
        stream_(std::move(data.stream)),
        judges_(stream_ == nullptr || data.other != nullptr),
        configs_(std::move(configs)),
        laid_(std::move(laid)),
        source_(log_.log, ranges_.training),
        judged_(data.other != nullptr ? data.other : log_.log, ranges_.judged),
        model_(make_model(settings, log_.log->schema()), group,
               // Beside the step of the tables, the longest part of backward.
               {.gradient_as_bucket_view = true, .overlap = true}),
        optimizer_(trainer::make_optimizer("dlrm.train", settings.optimizer, model_.parameters(),
                                           settings.learning_rate)),
        is_bfloat16_(settings.precision == "bfloat16"),
        device_(trainer::device_of(settings)) {
    make_tables();
    if (purpose == Purpose::kTrain) predict();
  }

  std::string name() const override { return "dlrm"; }
  const ClickSchema& log_schema() const { return log_.log->schema(); }
  const trainer::Settings& settings() const override { return settings_; }
  std::int64_t num_steps() const override {
    if (stream_ != nullptr && settings_.epochs > 0) return trainer::kEndless;
    return settings_.epochs > 0 ? settings_.epochs * source_.num_steps() : settings_.num_steps;
  }
  std::string longer() const override {
    if (settings_.epochs == 0) return Workload::longer();
    return "--epochs N goes on up to the end of epoch N";
  }

  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  void scale_rates(double factor) override {
    AnyWorkload::scale_rates(factor);
    tables_->set_learning_rate(factor * settings_.table_learning_rate);
  }
  void add_state(checkpoint::State& state) override {
    checkpoint::add_module(state, tables_module_, "tables.", "optimizer.tables.");
    checkpoint::add_module(state, model_.module());
    checkpoint::add_optimizer(state, *optimizer_, *model_.module());
    add_features(state);
  }
  void add_published(checkpoint::State& state) override {
    if (growing_) {
      published_ = checkpoint::add_published_rows(state, growing_, "tables.");
    } else {
      checkpoint::add_tables(state, published_tables(fixed_), "tables.");
    }
    checkpoint::add_module(state, model_.module());
    add_features(state);
  }
  void forget_published() override {
    if (published_) return published_->forget();
    for (const auto& optimizer : fixed_->optimizers()) optimizer->forget_rows();
  }
  std::vector<at::Tensor> parameters() const override {
    std::vector<at::Tensor> all = model_.parameters();
    for (const sharding::LocalShard& shard : tables_->local_shards()) {
      all.push_back(shard.weight);
      for (const auto& [name, state] : shard.state) all.push_back(state);
    }
    return all;
  }
  std::vector<trainer::Mark> marks() const override {
    return {{"samples_per_step", settings_.batch * group_.size(), "",
             " samples per step over all ranks"},
            {"seed", settings_.seed, "seed "}};
  }

  std::optional<ClickBatch> read_or_end(std::int64_t step) override {
    if (stream_ == nullptr) return read(step);
    if (next_streamed_ != step) stream_->skip(step - next_streamed_, trainer::told_to_stop);
    auto batch = stream_->next(trainer::told_to_stop);
    next_streamed_ = step + (batch && is_pause(*batch) ? 0 : 1);
    return batch;
  }
  // A rank of a stream has a sample in every step.
  bool is_pause(const ClickBatch& batch) const override {
    return stream_ != nullptr && batch.size() == 0;
  }
  void stop_reading() noexcept override {
    if (stream_ != nullptr) stream_->stop();
  }
  ClickBatch read(std::int64_t step) override {
    const std::int64_t length = source_.num_steps();
    source_.seek(length < 0 ? step : step % length);
    if (length > 0) source_.set_epoch(step / length);
    return *source_.next();
  }
  std::vector<pipeline::PipelinedModule<ClickBatch>> pipelined() const override {
    return {{"tables", tables_, [](const ClickBatch& batch) { return batch.sparse; }}};
  }
  Result forward(const ClickBatch& batch, const SparseInputs& inputs) override {
    const Rows rows = look_up(inputs);
    labels_ = batch.labels;
    const Span span(Phase::kDense);
    at::Tensor logits;
    {
      const Autocast autocast(is_bfloat16_, device_.type());
      logits = model_(batch.dense, rows);
    }
    return {at::binary_cross_entropy_with_logits(logits.to(at::kFloat), batch.labels), logits};
  }
  void follow() override {
    const auto now = std::chrono::steady_clock::now();
    // A ring of the last steps; evaluations between them do not move the median.
    if (num_followed_ > 0) {
      const double seconds = std::chrono::duration<double>(now - last_step_).count();
      if (step_seconds_.size() < kTimedSteps) step_seconds_.push_back(seconds);
      step_seconds_[static_cast<std::size_t>(num_followed_) % step_seconds_.size()] = seconds;
    }
    last_step_ = now;
    if (growth_) growth_->follow();
    const Span span(Phase::kOther, "running AUC");
    if (++num_followed_ % kAucWindow == 0) running_.clear();
    // Of a GPU what the step before has left, so that nobody waits for this one.
    const auto add = [this] {
      if (scores_copy_.is_started()) {
        running_.add(floats(scores_copy_.wait()), floats(labels_copy_.wait()));
      }
    };
    if (!device_.is_cpu()) add();
    scores_copy_.start(output().to(at::kFloat).contiguous());
    labels_copy_.start(labels_);
    if (device_.is_cpu()) add();
  }

  trainer::Figures evaluate() override {
    if (growth_) growth_->count();
    return judges_ ? evaluate(nullptr) : trainer::Figures{};
  }
  void finish() override {
    if (growth_) growth_->count();
  }
  std::string running_text() const override { return growth_ ? growth_->text() : ""; }
  std::vector<std::string> final_records() override {
    if (!growth_) return {};
    return {growth_->record()};
  }

  /// The same, and all logits in the order of the log.
  trainer::Figures evaluate(std::vector<float>* in_order) {
    ClickSums sums;
    std::vector<at::Tensor> scores;
    std::vector<at::Tensor> labels;
    pipeline::Steps<ClickBatch> steps;
    steps.forward = [&](const ClickBatch& batch, const SparseInputs& inputs) {
      const Rows rows = look_up(inputs);
      const Autocast autocast(is_bfloat16_, device_.type());
      // Not through the wrapper: nothing is to be averaged.
      const at::Tensor logits =
          model_.module()->forward(batch.dense, rows).to(at::kCPU, at::kFloat).contiguous();
      const at::Tensor clicks = batch.labels.cpu();
      if (!has_nan(logits)) sums.add(floats(logits), floats(clicks));
      scores.push_back(logits);
      labels.push_back(clicks);
      return pipeline::Result{{}, logits};
    };
    pipeline::EvalPipelineSparseDist<ClickBatch> judge(steps, pipelined(), {.device = device()});
    judged_.seek(0);
    while (judge.progress([this] { return judged_.next(); })) {
    }
    const at::Tensor words = at::from_blob(
        sums.words().data(), {static_cast<std::int64_t>(sums.words().size())}, at::kLong);
    at::Tensor summed = words.clone();
    comm::all_reduce_(summed, group_);
    words.copy_(summed);
    const at::Tensor all_scores = comm::all_gather_v(at::cat(scores), group_);
    const at::Tensor all_labels = comm::all_gather_v(at::cat(labels), group_);
    const bool is_broken = has_nan(all_scores);
    if (in_order != nullptr) *in_order = judged_in_order(floats(all_scores));
    if (group_.rank() == 0 && !is_broken) {
      calibration_ = calibration_parts(floats(all_scores), floats(all_labels), kCalibrationParts);
    }
    const double auc = is_broken ? kNaN : exact_auc(floats(all_scores), floats(all_labels));
    return {{"log_loss", is_broken ? kNaN : sums.log_loss()},
            {"auc", auc},
            {"normalized_entropy", is_broken ? kNaN : sums.normalised_entropy()},
            {"calibration", is_broken ? kNaN : sums.calibration()},
            {"samples", static_cast<double>(sums.num_samples())}};
  }

  std::vector<std::string> evaluation_records() override {
    std::vector<std::string> lines = final_records();
    if (calibration_.empty()) return lines;
    Json line{{"kind", "calibration"}};
    for (const CalibrationPart& part : calibration_) {
      line["predicted"].push_back(part.predicted);
      line["observed"].push_back(part.observed);
    }
    lines.push_back(line.dump());
    return lines;
  }
  std::vector<std::string> data_files() const override {
    std::vector<std::string> files;
    for (const std::string& names : {settings_.data, settings_.eval_data}) {
      if (names.empty() || names == "synthetic" || names == "-") continue;
      const std::vector<std::string> some = data::files_of(names);
      files.insert(files.end(), some.begin(), some.end());
    }
    return files;
  }
  std::vector<std::pair<std::string, std::string>> files() const override {
    const std::string& origin = log_.log->schema().origin;
    if (origin.empty()) return {};
    return {{kSchemaFile, origin}};
  }
  double units_per_step() const override {
    return static_cast<double>(settings_.batch * group_.size());
  }
  std::string introduction() override {
    if (growing_) return growing_introduction();
    if (log_.synthetic)
      ceiling_ = log_.synthetic->ceiling(settings_.eval_samples, kJudgedBegin).auc;
    const auto bytes = bytes_per_rank(laid_.plan, group_.size());
    double total = 0;
    double largest = 0;
    for (const double one : bytes) total += one;
    for (const auto& table : configs_) {
      largest = std::max(largest, 4.0 * static_cast<double>(table.num_embeddings) *
                                      static_cast<double>(table.embedding_dim));
    }
    const double imbalance =
        *std::max_element(bytes.begin(), bytes.end()) * group_.size() / std::max(total, 1.0);
    char head[160];
    std::snprintf(head, sizeof(head), "tables   %zu on %d ranks, largest %s, imbalance %.2f\n",
                  configs_.size(), group_.size(), report::bytes_text(largest).c_str(), imbalance);
    return log_.notes + head + plan_lines(laid_) + largest_tables(configs_, laid_.plan);
  }
  trainer::Figures facts() override { return results(); }
  trainer::Figures results() const override {
    trainer::Figures figures;
    if (ceiling_) figures.emplace_back("auc_ceiling", *ceiling_);
    if (growth_) {
      for (auto& figure : growth_->figures()) figures.push_back(std::move(figure));
    }
    return figures;
  }
  std::vector<std::string> records() override {
    if (growing_) return {};
    std::vector<std::string> lines{plan_record(settings_, laid_, predicted_)};
    const std::vector<double> ids = counted_ids();
    for (std::size_t i = 0; i < configs_.size(); ++i) {  // one per feature
      lines.push_back(
          table_record(configs_[i], laid_.plan.at(configs_[i].name), units_per_step() * ids[i]));
    }
    return lines;
  }
  trainer::Figures running() const override {
    // Samples of one class alone have none.
    const double auc = running_.value();
    return std::isnan(auc) ? trainer::Figures{} : trainer::Figures{{"train auc", auc}};
  }
  std::string verdict(const trainer::Figures& evaluation) const override {
    char text[160];
    if (std::isfinite(evaluation[0].second) && std::isnan(evaluation[1].second)) {
      std::snprintf(text, sizeof(text), "judged   log loss %.4f | no auc, all are of one class",
                    evaluation[0].second);
    } else {
      std::snprintf(text, sizeof(text), "judged   log loss %.4f | auc %.4f", evaluation[0].second,
                    evaluation[1].second);
    }
    char best[64] = "";
    if (ceiling_ && std::isfinite(*ceiling_)) {
      std::snprintf(best, sizeof(best), ", best possible %.4f", *ceiling_);
    }
    return std::string(text) + best + "\n" +
           (predicted_ ? prediction_line(*predicted_, step_seconds_) : "");
  }
  std::string rates() const override {
    char text[64];
    std::snprintf(text, sizeof(text), " and --table-lr %g", settings_.table_learning_rate);
    return AnyWorkload::rates() + text;
  }

 private:
  using Rows = comm::LazyAwaitable<jagged::KeyedTensor>;

  // Of a sample, for each feature: as its statistics say, or the first samples of the log.
  std::vector<double> counted_ids() const {
    std::vector<double> ids = ids_per_sample(*log_.log);
    if (settings_.stats.empty()) return ids;
    auto tables = planner_tables(log_.log->schema(), settings_.embedding_dim, settings_.bag_size);
    for (std::size_t i = 0; i < ids.size(); ++i) tables[i].features[0].ids = ids[i];
    apply_statistics(settings_.stats, tables);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = tables[i].features[0].ids;
    return ids;
  }

  void make_tables() {
    const ClickSchema& schema = log_.log->schema();
    if (settings_.is_unlimited() || any_grows(schema)) {
      collision::GrowingOptions options;
      options.optimizer = table_options(settings_).optimizer;
      growing_ = std::make_shared<collision::GrowingEmbeddingBagCollection>(
          growing_tables(settings_, schema), group_, options,
          growing_placements(settings_, schema, group_.size()));
      tables_ = growing_;
      tables_module_ = growing_;
      growth_.emplace(growing_, texts_);
      return;
    }
    fixed_ = std::make_shared<ShardedEmbeddingBagCollection>(
        configs_, laid_.plan, group_, /*is_weighted=*/false, table_options(settings_));
    tables_ = fixed_;
    tables_module_ = fixed_;
    fill_tables(*fixed_, static_cast<std::uint64_t>(settings_.seed));
  }

  std::string growing_introduction() const {
    std::int64_t num_fixed = 0;
    for (const Feature& feature : log_.log->schema().features) {
      num_fixed += !feature.grows() && !settings_.is_unlimited() ? 1 : 0;
    }
    const auto num_growing = static_cast<std::int64_t>(configs_.size()) - num_fixed;
    std::string text = log_.notes + "tables   " + std::to_string(num_growing) + " that grow" +
                       (num_fixed > 0 ? " and " + std::to_string(num_fixed) + " others, " : ", ") +
                       (settings_.sharding == "table_wise" ? "each on one" : "over all") + " of " +
                       std::to_string(group_.size()) + " ranks";
    if (settings_.id_capacity > 0) {
      text += ", up to " + report::short_number(static_cast<double>(settings_.id_capacity)) +
              " ids each";
    }
    return text + "; admission " + settings_.id_admission + ", eviction " + settings_.id_eviction +
           "\n";
  }

  // The order in which they are mixed, which names of tables alone do not tell, and which of them
  // are averaged.
  void add_features(checkpoint::State& state) const {
    Json features = Json::array();
    Json averaged = Json::array();
    for (const Feature& feature : log_.log->schema().features) {
      features.push_back(feature.name);
      if (feature.means) averaged.push_back(feature.name);
    }
    const auto text = [](const Json& names) {
      return names.dump(-1, ' ', false, Json::error_handler_t::replace);
    };
    state.values["features"] = text(features);
    if (!averaged.empty()) state.values["mean_features"] = text(averaged);
    if (growing_) state.values["id_default"] = settings_.id_default;
  }

  // If rank 0 has a measured machine, all ranks try what the profile does not know.
  void predict() {
    at::Tensor is_measured = at::full({1}, laid_.known.is_measured ? 1 : 0, at::kLong);
    comm::all_reduce_(is_measured, group_, comm::Reduction::kMax);
    if (is_measured.item<std::int64_t>() == 0) return;
    planner::DenseLoad dense = dense_load(settings_, model_.parameters(), configs_.size());
    if (device_.is_cpu() && !is_bfloat16_) {
      const auto trial = make_model(settings_, log_.log->schema());
      BatchSource source(log_.log, source_.options());
      time_dense(settings_, *trial, source, group_, dense);
    }
    if (group_.rank() == 0) {
      predicted_ = planner::predict(laid_.known.profile, laid_.figures.per_rank, dense);
    }
  }

  // Gathered are the samples of all steps of rank 0, then those of rank 1, and so on.
  std::vector<float> judged_in_order(std::span<const float> gathered) const {
    const std::int64_t total = judged_.options().end - judged_.options().begin;
    const std::int64_t step_size = settings_.batch * group_.size();
    std::vector<float> ordered(gathered.size());
    auto next = gathered.begin();
    for (std::int64_t rank = 0; rank < group_.size(); ++rank) {
      for (std::int64_t first = 0; first < total; first += step_size) {
        const std::int64_t all = std::min(step_size, total - first);
        const auto [begin, end] = part_of_rank(all, rank, group_.size());
        std::copy_n(next, end - begin, ordered.begin() + first + begin);
        next += end - begin;
      }
    }
    return ordered;
  }

  Rows look_up(const SparseInputs& inputs) {
    const Span span(Phase::kLookup);
    const auto& own = inputs.of(*tables_);
    const Rows pending =
        growing_ ? growing_->compute_and_output_dist(own) : fixed_->compute_and_output_dist(own);
    return Rows([pending] {
      const Span span(Phase::kOutputDist);
      return pending.wait();
    });
  }

  const Settings& settings_;
  comm::Group group_;
  Ranges ranges_;
  OpenedLog log_;
  std::shared_ptr<TextCheck> texts_;  // rank 0, if they are checked
  std::unique_ptr<StreamBatches> stream_;
  bool judges_;
  std::int64_t next_streamed_ = 0;  // step; the reader's
  std::vector<embedding::EmbeddingTableConfig> configs_;
  LaidTables laid_;
  BatchSource source_;
  BatchSource judged_;
  data_parallel::DistributedDataParallel<Dlrm> model_;
  std::shared_ptr<sharding::ShardedTables> tables_;  // one of the two
  std::shared_ptr<ShardedEmbeddingBagCollection> fixed_;
  std::shared_ptr<collision::GrowingEmbeddingBagCollection> growing_;
  std::shared_ptr<collision::GrowingChanges> published_;  // since the last publication
  std::shared_ptr<torch::nn::Module> tables_module_;      // the tables
  std::optional<GrowthWatch> growth_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  bool is_bfloat16_;
  at::Device device_;
  at::Tensor labels_;  // of the batch that was computed last
  trainer::HostCopy scores_copy_;
  trainer::HostCopy labels_copy_;
  StreamingAuc running_;
  std::int64_t num_followed_ = 0;
  std::chrono::steady_clock::time_point last_step_;
  std::vector<double> step_seconds_;
  std::optional<planner::StepTime> predicted_;  // rank 0, of a measured machine
  std::optional<double> ceiling_;
  std::vector<CalibrationPart> calibration_;  // rank 0, of the last evaluation
};

std::unique_ptr<Training> make(const std::string& verb, const Settings& settings,
                               const comm::Group& world, const std::string& data, Purpose purpose) {
  TrainingData opened = open_data(settings, data, purpose, world);
  const ClickSchema& schema = opened.log.log->schema();
  auto tables = tables_of(schema, settings.embedding_dim);
  settings.check_numbers(schema);
  // Tables that grow hold any ids and have no plan.
  LaidTables laid;
  if (!settings.is_unlimited()) {
    settings.check_tables(schema);
    if (!any_grows(schema)) laid = lay_tables(verb, settings, schema, tables, world);
  }
  return std::make_unique<Training>(settings, std::move(opened), purpose, std::move(tables),
                                    std::move(laid), world);
}

}  // namespace

std::unique_ptr<trainer::AnyWorkload> make_workload(const Settings& settings,
                                                    const comm::Group& world) {
  return make("train", settings, world, settings.data, Purpose::kTrain);
}

Judged judge(const Settings& settings, const std::string& data, const std::string& checkpoints,
             std::int64_t step, const std::string& schema, const comm::Group& world) {
  Settings own = settings;
  if (own.is_stream() && data.empty()) {
    if (own.eval_data.empty()) {
      throw DataError(
          "eval: the run was trained on a stream, which is gone. Name a log with --data.");
    }
    return judge(settings, settings.eval_data, checkpoints, step, schema, world);
  }
  // Speeds and statistics shape a plan alone, and their files need not be there any more.
  own.profile.clear();
  own.stats.clear();
  const auto model = make("eval", own, world, data.empty() ? settings.data : data,
                          data.empty() ? Purpose::kTrain : Purpose::kJudge);
  const std::string& origin = model->log_schema().origin;
  if (!schema.empty() && !origin.empty() && !data::is_same_meaning(schema, origin)) {
    throw DataError(data +
                    ": was made by another schema than the log of the run. Convert it with " +
                    std::string(kSchemaFile) + " of the run folder.");
  }
  checkpoint::State state;
  model->add_state(state);
  checkpoint::LoadOptions options;
  if (step >= 0) options.step = step;
  const checkpoint::LoadReport report = checkpoint::load(checkpoints, state, world, options);
  Judged judged;
  judged.figures = model->evaluate(&judged.scores);
  judged.step = report.step;
  judged.checkpoint = report.folder;
  return judged;
}

}  // namespace tessera::workloads::dlrm
