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
#include "data/raw_log.h"
#include "dlrm/batch.h"
#include "dlrm/from_settings.h"
#include "dlrm/growing.h"
#include "dlrm/metrics.h"
#include "dlrm/model.h"
#include "dlrm/open_raw.h"
#include "dlrm/stream_batches.h"
#include "dlrm/trial.h"
#include "report/html.h"
#include "tessera/checkpoint/growing_tables.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/modules.h"
#include "tessera/checkpoint/tables.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/leader.h"
#include "tessera/comm/topology.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/planner/machine_profile.h"
#include "tessera/planner/plan_error.h"
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

// Where the judged samples of a log without end begin: training never comes so far.
constexpr std::int64_t kJudgedBegin = std::int64_t{1} << 40;
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

// The same number for the same seed, table, row and column, wherever the row lies.
float uniform(std::uint64_t seed, std::uint64_t table, std::uint64_t row, std::uint64_t column) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15U + table;
  for (const std::uint64_t word : {row, column}) {
    x = (x ^ word) + 0x9e3779b97f4a7c15U;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    x ^= x >> 31;
  }
  return static_cast<float>(x >> 40) * 0x1p-23F - 1.0F;
}

void fill_tables(const ShardedEmbeddingBagCollection& tables, std::uint64_t seed) {
  const auto& configs = tables.embedding_bag_configs();
  for (const sharding::LocalShard& shard : tables.local_shards()) {
    const auto config = std::find_if(configs.begin(), configs.end(),
                                     [&](const auto& one) { return one.name == shard.table; });
    const auto number = static_cast<std::uint64_t>(config - configs.begin());
    const auto bound = static_cast<float>(config->get_weight_init_max());
    const at::Tensor weight = shard.weight.detach();
    // On the host, so that tables start with the same numbers on every device.
    const at::Tensor drawn = weight.is_cpu() ? weight : at::empty(weight.sizes(), at::kFloat);
    auto* row = drawn.data_ptr<float>();
    for (std::int64_t r = 0; r < shard.place.rows; ++r, row += shard.place.columns) {
      for (std::int64_t c = 0; c < shard.place.columns; ++c) {
        row[c] = bound * uniform(seed, number, static_cast<std::uint64_t>(shard.place.row + r),
                                 static_cast<std::uint64_t>(shard.place.column + c));
      }
    }
    if (!weight.is_cpu()) weight.copy_(drawn);
  }
}

struct Ranges {
  BatchSourceOptions training;
  BatchSourceOptions judged;
};

// What a log is opened for: training on most of it, or judging all of it.
enum class Purpose : std::uint8_t { kTrain, kJudge };

Ranges ranges_of(const Settings& settings, const ClickLog& log, const comm::Group& group,
                 Purpose purpose, const ClickLog* other) {
  Ranges ranges;
  for (BatchSourceOptions* range : {&ranges.training, &ranges.judged}) {
    range->batch_size = settings.batch;
    range->rank = group.rank();
    range->world = group.size();
  }
  ranges.judged.drop_last = false;
  const std::int64_t count = log.num_samples();
  if (settings.shuffle && purpose == Purpose::kTrain) {
    ranges.training.shuffle_seed = static_cast<std::uint64_t>(settings.seed);
  }
  if (purpose == Purpose::kJudge && count >= 0) {
    ranges.training.drop_last = false;
  } else if (other != nullptr) {
    ranges.judged.end = other->num_samples();
    ranges.training.end = count;
  } else if (count < 0) {
    ranges.judged.begin = kJudgedBegin;
    ranges.judged.end = kJudgedBegin + settings.eval_samples;
  } else {
    const std::int64_t judged =
        std::min(settings.eval_samples, std::max<std::int64_t>(1, count / 10));
    ranges.judged.begin = count - judged;
    ranges.judged.end = count;
    ranges.training.end = count - judged;
  }
  return ranges;
}

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

sharding::ShardedOptions table_options(const Settings& settings) {
  sharding::ShardedOptions tables;
  tables.optimizer.kind = table_optimizer_of(settings.table_optimizer);
  tables.optimizer.learning_rate = settings.table_learning_rate;
  tables.exact_row_norms = true;  // the same steps whether a table is cut by columns or not
  tables.device = trainer::device_of(settings);
  return tables;
}

std::shared_ptr<Dlrm> make_model(const Settings& settings, const ClickSchema& schema) {
  auto model = std::make_shared<Dlrm>(model_options(settings, schema));
  model->to(trainer::device_of(settings));
  return model;
}

// `lookups` is the number of rows that all ranks ask for in a step, spread evenly over the table; a
// copy of a whole table answers its own rank.
Json table_line(const embedding::EmbeddingTableConfig& table,
                const sharding::ParameterSharding& sharding, double lookups) {
  Json shards = Json::array();
  const bool is_copied = sharding.type == sharding::ShardingType::kDataParallel;
  for (const sharding::Shard& shard : sharding.shards) {
    const double share =
        is_copied ? 1.0 / static_cast<double>(sharding.shards.size())
                  : static_cast<double>(shard.rows) / static_cast<double>(table.num_embeddings);
    shards.push_back({{"rank", shard.rank},
                      {"row", shard.row},
                      {"rows", shard.rows},
                      {"column", shard.column},
                      {"columns", shard.columns},
                      {"bytes", 4 * shard.rows * shard.columns},
                      {"traffic", 4 * lookups * share * static_cast<double>(shard.columns)}});
  }
  return {{"kind", "table"},
          {"name", table.name},
          {"rows", table.num_embeddings},
          {"columns", table.embedding_dim},
          {"bytes", 4 * table.num_embeddings * table.embedding_dim},
          {"sharding", sharding::name_of(sharding.type)},
          {"shards", shards}};
}

// How the tables lie, and on rank 0 what the planner thinks of it.
struct LaidTables {
  sharding::ModulePlan plan;
  PlanFigures figures;
  KnownSpeeds known;
};

// The planner's plan of rank 0, for all, or what the settings say.
LaidTables lay_tables(const std::string& verb, const Settings& settings, const ClickSchema& schema,
                      const std::vector<embedding::EmbeddingTableConfig>& tables,
                      const comm::Group& world) {
  const sharding::Topology topology{world.size(), comm::get_local_size(world.size())};
  LaidTables laid;
  planner::Problem problem;
  // Rank 0's machine and files count; whatever is wrong with them is told on all ranks.
  const std::string answer = comm::invoke_on_rank_and_broadcast_result(world, 0, [&] {
    try {
      laid.known = known_speeds(settings.profile);
      PlanRequest request;
      request.num_ranks = topology.world_size;
      request.ranks_per_host = topology.local_size;
      request.batch = settings.batch;
      request.table_optimizer = settings.table_optimizer;
      request.rank = {memory_of_rank(topology.local_size), laid.known.speeds};
      auto listed = planner_tables(schema, settings.embedding_dim, settings.bag_size);
      if (!settings.stats.empty()) apply_statistics(settings.stats, listed);
      problem = table_problem(std::move(listed), request);
    } catch (const planner::PlanError& error) {
      return nlohmann::json{{"error", error.what()}}.dump();
    }
    return is_planned(settings) ? planner_answer(problem) : std::string("{}");
  });
  laid.plan = is_planned(settings) || answer != "{}"
                  ? plan_from_answer(verb, answer, tables, topology)
                  : plan_of(verb, settings, tables, topology);
  for (const auto& [name, table] : laid.plan) {
    TESSERA_CHECK_VALUE(table.kernel == sharding::ComputeKernel::kFused, verb, ": table '", name,
                        "' has the kernel dense, whose rows no optimizer of this training steps. "
                        "Write fused into the plan.");
  }
  if (world.rank() == 0) laid.figures = figures_of(problem, laid.plan);
  return laid;
}

// Rows of the tables without what steps them, and which of them were stepped.
class PublishedTables final : public checkpoint::TableSource {
 public:
  explicit PublishedTables(std::shared_ptr<ShardedEmbeddingBagCollection> tables)
      : tables_(std::move(tables)) {
    for (const auto& optimizer : tables_->optimizers()) optimizer->track_rows();
  }

  std::vector<checkpoint::TableShard> shards() override {
    std::vector<checkpoint::TableShard> shards;
    for (const sharding::LocalShard& local : tables_->local_shards()) {
      checkpoint::TableShard shard;
      shard.name = "embedding_bags." + local.table + ".weight";
      shard.table_rows = local.table_rows;
      shard.table_columns = local.table_columns;
      shard.row = local.place.row;
      shard.column = local.place.column;
      shard.weight = local.weight;
      shard.is_replicated =
          tables_->plan().at(local.table).type == sharding::ShardingType::kDataParallel;
      for (const auto& optimizer : tables_->optimizers()) {
        if (optimizer->has_table(local.name)) {
          shard.touched_rows = optimizer->stepped_rows(local.name);
        }
      }
      shards.push_back(std::move(shard));
    }
    return shards;
  }

 private:
  std::shared_ptr<ShardedEmbeddingBagCollection> tables_;
};

class Training final : public trainer::Workload<ClickBatch> {
 public:
  /// Judges on `other`, if there is one. Trains on `stream`, if there is one.
  Training(const Settings& settings, OpenedLog log, std::shared_ptr<const ClickLog> other,
           Purpose purpose, std::vector<embedding::EmbeddingTableConfig> configs, LaidTables laid,
           const comm::Group& group, std::unique_ptr<StreamBatches> stream = nullptr)
      : settings_(settings),
        group_(group),
        log_(std::move(log)),
        stream_(std::move(stream)),
        judges_(stream_ == nullptr || other != nullptr),
        configs_(std::move(configs)),
        laid_(std::move(laid)),
        source_(log_.log, ranges_of(settings, *log_.log, group, purpose, other.get()).training),
        judged_(other != nullptr ? other : log_.log,
                ranges_of(settings, *log_.log, group, purpose, other.get()).judged),
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
      checkpoint::add_published_rows(state, growing_, "tables.");
    } else {
      checkpoint::add_tables(state, std::make_shared<PublishedTables>(fixed_), "tables.");
    }
    checkpoint::add_module(state, model_.module());
    add_features(state);
  }
  void forget_published() override {
    if (growing_) return growing_->forget_changes();
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
    next_streamed_ = step + 1;
    return stream_->next(trainer::told_to_stop);
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
    if (settings_.data != "synthetic" && settings_.data != "-") files.push_back(settings_.data);
    if (!settings_.eval_data.empty()) files.push_back(settings_.eval_data);
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
    return log_.notes + head + plan_lines() + largest_tables();
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
    std::vector<std::string> lines{plan_record().dump()};
    for (std::size_t i = 0; i < configs_.size(); ++i) {  // one per feature
      const std::int64_t bag = log_.log->schema().features[i].bag_size;
      const double lookups =
          units_per_step() * static_cast<double>(bag > 0 ? bag : settings_.bag_size);
      lines.push_back(table_line(configs_[i], laid_.plan.at(configs_[i].name), lookups)
                          .dump(-1, ' ', false, Json::error_handler_t::replace));
    }
    return lines;
  }
  trainer::Figures running() const override { return {{"train auc", running_.value()}}; }
  std::string verdict(const trainer::Figures& evaluation) const override {
    char text[160];
    std::snprintf(text, sizeof(text), "judged   log loss %.4f | auc %.4f", evaluation[0].second,
                  evaluation[1].second);
    char best[64] = "";
    if (ceiling_ && std::isfinite(*ceiling_)) {
      std::snprintf(best, sizeof(best), ", best possible %.4f", *ceiling_);
    }
    return std::string(text) + best + "\n" + prediction_line();
  }
  std::string rates() const override {
    char text[64];
    std::snprintf(text, sizeof(text), " and --table-lr %g", settings_.table_learning_rate);
    return AnyWorkload::rates() + text;
  }

 private:
  using Rows = comm::LazyAwaitable<jagged::KeyedTensor>;

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
      growth_.emplace(growing_);
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
    planner::DenseLoad dense = dense_load();
    if (device_.is_cpu() && !is_bfloat16_) {
      const auto trial = make_model(settings_, log_.log->schema());
      BatchSource source(log_.log, source_.options());
      time_dense(settings_, *trial, source, group_, dense);
    }
    if (group_.rank() == 0) {
      predicted_ = planner::predict(laid_.known.profile, laid_.figures.per_rank, dense);
    }
  }

  // Products of layers, and of every pair of features.
  planner::DenseLoad dense_load() const {
    planner::DenseLoad load;
    load.layers = 0;
    double products = 0;
    for (const at::Tensor& parameter : model_.parameters()) {
      load.bytes += static_cast<double>(parameter.numel()) * 4;
      if (parameter.dim() != 2) continue;
      products += static_cast<double>(parameter.numel());
      ++load.layers;
    }
    const auto num_vectors = static_cast<double>(configs_.size()) + 1;
    if (settings_.interaction == "dot") {
      products += num_vectors * num_vectors * static_cast<double>(settings_.embedding_dim);
    }
    load.operations = 6 * static_cast<double>(settings_.batch) * products;
    return load;
  }

  std::string plan_lines() const {
    const PlanFigures& figures = laid_.figures;
    char text[160];
    std::snprintf(text, sizeof(text),
                  "plan     tables %.4g ms a step, no plan can be under %.4g ms (%.2f %%)\n",
                  figures.seconds * 1e3, figures.bound * 1e3,
                  figures.bound > 0 ? 100 * (figures.seconds / figures.bound - 1) : 0.0);
    return laid_.known.note + "\n" + text;
  }
  Json plan_record() const {
    const PlanFigures& figures = laid_.figures;
    Json ranks = Json::array();
    for (const planner::ShardCost& cost : figures.per_rank) {
      const planner::Seconds& seconds = cost.seconds;
      ranks.push_back({{"ids", seconds.ids},
                       {"lookup", seconds.lookup},
                       {"rows", seconds.rows},
                       {"gradients", seconds.gradients},
                       {"step", seconds.step},
                       {"bytes", cost.bytes.total()}});
    }
    Json record{{"kind", "plan"},
                {"sharding", settings_.plan.empty() ? settings_.sharding : settings_.plan},
                {"seconds", figures.seconds},
                {"bound", figures.bound},
                {"speeds", laid_.known.is_measured ? "measured" : "assumed"},
                {"ranks", std::move(ranks)}};
    if (predicted_) {
      record["predicted"] = {
          {"links", predicted_->links},         {"lookup", predicted_->lookup},
          {"dense", predicted_->dense},         {"backward", predicted_->backward},
          {"gradients", predicted_->gradients}, {"step", predicted_->step},
          {"other", predicted_->other},         {"total", predicted_->total()}};
    }
    return record;
  }
  std::string prediction_line() const {
    if (!predicted_ || step_seconds_.empty()) return "";
    std::vector<double> times = step_seconds_;
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    char text[160];
    std::snprintf(
        text, sizeof(text), "plan     predicted %.4g ms a step, measured %.4g ms (%+.0f %%)\n",
        predicted_->total() * 1e3, *middle * 1e3, 100 * (*middle / predicted_->total() - 1));
    return text;
  }

  // Where the largest tables lie; the others are counted.
  std::string largest_tables() const {
    constexpr std::size_t kShown = 10;
    std::vector<const embedding::EmbeddingTableConfig*> order;
    for (const auto& table : configs_) order.push_back(&table);
    std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
      return a->num_embeddings * a->embedding_dim > b->num_embeddings * b->embedding_dim;
    });
    sharding::ModulePlan shown;
    for (std::size_t i = 0; i < std::min(kShown, order.size()); ++i) {
      shown[order[i]->name] = laid_.plan.at(order[i]->name);
    }
    std::string text = sharding::ShardingPlan{{{kModule, shown}}}.str(80);
    if (order.size() > kShown) {
      text += "  and " + std::to_string(order.size() - kShown) +
              " tables that are not larger; tessera plan tables shows all\n";
    }
    return text;
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
  OpenedLog log_;
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
  std::shared_ptr<torch::nn::Module> tables_module_;  // the same
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

}  // namespace

namespace {

// Two logs of one model.
void check_same_schema(const std::string& first, const ClickSchema& one, const std::string& second,
                       const ClickSchema& other) {
  if (one == other) return;
  throw DataError(second + ": has other columns or tables than " + first +
                  ". Convert both with the same schema.");
}

// With tables that grow: any ids, no plan.
std::unique_ptr<Training> make_growing(const Settings& settings, const comm::Group& world,
                                       const std::string& data, Purpose purpose) {
  const bool trains = purpose == Purpose::kTrain;
  OpenedLog log;
  std::unique_ptr<StreamBatches> stream;
  if (trains && settings.is_stream()) {
    stream =
        std::make_unique<StreamBatches>(StreamBatchesOptions{data, settings.follow, settings.batch},
                                        data::schema_or_guess(settings.schema, data), world);
    log.log = std::make_shared<const UnseenLog>(stream->schema());
  } else {
    log = open_raw(data, settings.schema, log_options(settings));
  }
  std::shared_ptr<const ClickLog> other;
  if (!settings.eval_data.empty() && trains) {
    other = open_raw(settings.eval_data, settings.schema, log_options(settings)).log;
    check_same_schema(data, log.log->schema(), settings.eval_data, other->schema());
  }
  auto tables = tables_of(log.log->schema(), settings.embedding_dim);
  return std::make_unique<Training>(settings, std::move(log), std::move(other), purpose,
                                    std::move(tables), LaidTables{}, world, std::move(stream));
}

// The log of a table. `tessera train` has made it before the ranks were started.
std::string log_name(const std::string& data, const Settings& settings) {
  const bool converts = !settings.schema.empty() && data::is_table(data);
  return converts ? data::convert_once(data, settings.schema).path : data;
}

std::unique_ptr<Training> make(const std::string& verb, const Settings& settings,
                               const comm::Group& world, const std::string& data, Purpose purpose) {
  if (settings.is_unlimited()) return make_growing(settings, world, data, purpose);
  OpenedLog log = open_log(log_name(data, settings), log_options(settings));
  std::shared_ptr<const ClickLog> other;
  if (!settings.eval_data.empty() && purpose == Purpose::kTrain) {
    other = open_log(log_name(settings.eval_data, settings), log_options(settings)).log;
    check_same_schema(data, log.log->schema(), settings.eval_data, other->schema());
  }
  auto tables = tables_of(log.log->schema(), settings.embedding_dim);
  settings.check_tables(log.log->schema());
  if (any_grows(log.log->schema())) {
    return std::make_unique<Training>(settings, std::move(log), std::move(other), purpose,
                                      std::move(tables), LaidTables{}, world);
  }
  auto laid = lay_tables(verb, settings, log.log->schema(), tables, world);
  return std::make_unique<Training>(settings, std::move(log), std::move(other), purpose,
                                    std::move(tables), std::move(laid), world);
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
