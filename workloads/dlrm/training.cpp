#include "dlrm/training.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include "dlrm/batch.h"
#include "dlrm/checkpoints.h"
#include "dlrm/metrics.h"
#include "dlrm/schedule.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fingerprint.h"
#include "tessera/pipeline/read_ahead.h"
#include "tessera/pipeline/train_pipeline.h"
#include "tessera/sharding/sharded_embedding_bag_collection.h"

namespace tessera::workloads::dlrm {
namespace {

using core::Phase;
using core::Span;
using pipeline::SparseInputs;
using sharding::ShardedEmbeddingBagCollection;

// Where the judged samples of a log without end begin: training never comes so far.
constexpr std::int64_t kJudgedBegin = std::int64_t{1} << 40;
// Predictions of so many steps make the running AUC.
constexpr std::int64_t kAucWindow = 50;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool has_nan(const at::Tensor& tensor) { return at::isnan(tensor).any().item<bool>(); }

std::span<const float> floats(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
}

// Dense layers compute in bfloat16 while it lives.
class Autocast {
 public:
  explicit Autocast(bool is_on) : is_on_(is_on) {
    if (!is_on_) return;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!is_on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool is_on_;
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
    auto* row = weight.data_ptr<float>();
    for (std::int64_t r = 0; r < shard.place.rows; ++r, row += shard.place.columns) {
      for (std::int64_t c = 0; c < shard.place.columns; ++c) {
        row[c] = bound * uniform(seed, number, static_cast<std::uint64_t>(shard.place.row + r),
                                 static_cast<std::uint64_t>(shard.place.column + c));
      }
    }
  }
}

void check(const TrainingOptions& options, const comm::Group& group) {
  TESSERA_CHECK_VALUE(options.num_steps >= 0 && options.batch > 0 && options.eval_samples > 0,
                      "dlrm.train: ", options.num_steps, " steps of ", options.batch,
                      " samples on ", group.size(), " ranks, judged on ", options.eval_samples,
                      ", make no sense.");
}

struct Ranges {
  BatchSourceOptions training;
  BatchSourceOptions judged;
};

Ranges ranges_of(const TrainingOptions& options, const ClickLog& log, const comm::Group& group) {
  Ranges ranges;
  for (BatchSourceOptions* range : {&ranges.training, &ranges.judged}) {
    range->batch_size = options.batch;
    range->rank = group.rank();
    range->world = group.size();
  }
  ranges.judged.drop_last = false;
  const std::int64_t count = log.num_samples();
  if (count < 0) {
    ranges.judged.begin = kJudgedBegin;
    ranges.judged.end = kJudgedBegin + options.eval_samples;
  } else {
    const std::int64_t judged =
        std::min(options.eval_samples, std::max<std::int64_t>(1, count / 10));
    ranges.judged.begin = count - judged;
    ranges.judged.end = count;
    ranges.training.end = count - judged;
  }
  return ranges;
}

DlrmOptions model_options(const TrainingOptions& options, const ClickSchema& schema) {
  DlrmOptions model = options.model;
  model.num_dense = schema.num_dense;
  model.features.clear();
  for (const Feature& feature : schema.features) model.features.push_back(feature.name);
  model.seed = options.seed;
  return model;
}

sharding::ShardedOptions table_options(const TrainingOptions& options) {
  sharding::ShardedOptions tables;
  tables.optimizer.kind = options.table_optimizer;
  tables.optimizer.learning_rate = options.table_learning_rate;
  tables.exact_row_norms = true;  // the same steps whether a table is cut by columns or not
  return tables;
}

class Training {
 public:
  Training(const TrainingOptions& options, std::shared_ptr<const ClickLog> log,
           const sharding::ModulePlan& plan, const comm::Group& group, core::StepRecorder& recorder)
      : options_(options),
        group_(group),
        recorder_(recorder),
        source_(log, ranges_of(options, *log, group).training),
        judged_(log, ranges_of(options, *log, group).judged),
        model_(std::make_shared<Dlrm>(model_options(options, log->schema())), group,
               // Beside the step of the tables, the longest part of backward.
               {.gradient_as_bucket_view = true, .overlap = true}),
        tables_(std::make_shared<ShardedEmbeddingBagCollection>(
            tables_of(log->schema(), options.model.embedding_dim), plan, group,
            /*is_weighted=*/false, table_options(options))),
        optimizer_(
            make_dense_optimizer(options.optimizer, model_.parameters(), options.learning_rate)),
        pipeline_(training_steps(), pipelined(), {.reads_late = true}) {
    fill_tables(*tables_, options.seed);
    if (!options.checkpoints.empty()) {
      checkpoints_ = std::make_unique<Checkpoints>(
          CheckpointOptions{options.checkpoints, options.keep_checkpoints,
                            options.batch * group.size(), options.seed},
          *model_.module(), *optimizer_, *tables_, group);
    }
  }

  std::int64_t resume() {
    const std::int64_t first = checkpoints_ && options_.resume ? checkpoints_->load() : 0;
    next_read_ = first;
    reader_.emplace([this] { return read_batch(); });
    return first;
  }

  Progress step(std::int64_t step) {
    recorder_.begin_step(step);
    Progress progress;
    progress.step = step + 1;
    progress.samples = options_.batch * group_.size();
    const double factor =
        schedule_factor(step, options_.num_steps, options_.warmup_steps, options_.decay);
    progress.learning_rate = factor * options_.learning_rate;
    set_learning_rate(*optimizer_, progress.learning_rate);
    tables_->set_learning_rate(factor * options_.table_learning_rate);
    const auto logits = pipeline_.progress([this] { return reader_->next(); });
    TESSERA_INTERNAL_ASSERT(logits, "every step has a batch");
    finish(progress);
    if (std::isfinite(progress.loss)) follow(*logits);
    progress.time = recorder_.end_step();
    last_exposed_ = progress.time.exposed_comm_seconds();
    progress.auc = running_.value();
    return progress;
  }

  Evaluation evaluate(std::int64_t step) {
    ClickSums sums;
    std::vector<at::Tensor> scores;
    std::vector<at::Tensor> labels;
    pipeline::Steps<ClickBatch> steps;
    steps.forward = [&](const ClickBatch& batch, const SparseInputs& inputs) {
      const Rows rows = look_up(inputs);
      const Autocast autocast(options_.bfloat16);
      // Not through the wrapper: nothing is to be averaged.
      const at::Tensor logits =
          model_.module()->forward(batch.dense, rows).to(at::kFloat).contiguous();
      if (!has_nan(logits)) sums.add(floats(logits), floats(batch.labels));
      scores.push_back(logits);
      labels.push_back(batch.labels);
      return pipeline::Result{{}, logits};
    };
    pipeline::EvalPipelineSparseDist<ClickBatch> judge(steps, pipelined());
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
    if (has_nan(all_scores)) return {step, kNaN, kNaN, kNaN, kNaN, sums.num_samples()};
    return {step,
            sums.log_loss(),
            exact_auc(floats(all_scores), floats(all_labels)),
            sums.normalised_entropy(),
            sums.calibration(),
            sums.num_samples()};
  }

  void save(std::int64_t step, bool waits) {
    if (checkpoints_) checkpoints_->save(step, waits);
  }

  void listen_for_stop(const std::function<bool()>& is_told_to_stop) {
    is_told_to_stop_ = is_told_to_stop;
  }
  bool is_stopping() const noexcept { return is_stopping_; }

  std::uint64_t fingerprint() const {
    std::uint64_t sum = 0;
    for (const sharding::LocalShard& shard : tables_->local_shards()) {
      sum = sum * 31 + data_parallel::fingerprint(shard.weight.detach());
      for (const auto& [name, state] : shard.state) {
        sum = sum * 31 + data_parallel::fingerprint(state);
      }
    }
    if (group_.rank() == 0) {
      for (const at::Tensor& parameter : model_.parameters()) {
        sum = sum * 31 + data_parallel::fingerprint(parameter.detach());
      }
    }
    at::Tensor all = at::full({1}, static_cast<std::int64_t>(sum), at::kLong);
    comm::all_reduce_(all, group_);
    return static_cast<std::uint64_t>(all.item<std::int64_t>());
  }

 private:
  pipeline::Steps<ClickBatch> training_steps() {
    pipeline::Steps<ClickBatch> steps;
    steps.zero_grad = [this] { optimizer_->zero_grad(/*set_to_none=*/false); };
    steps.forward = [this](const ClickBatch& batch, const SparseInputs& inputs) {
      const Rows rows = look_up(inputs);
      labels_ = batch.labels;
      const Span span(Phase::kDense);
      at::Tensor logits;
      {
        const Autocast autocast(options_.bfloat16);
        logits = model_(batch.dense, rows);
      }
      const at::Tensor loss =
          at::binary_cross_entropy_with_logits(logits.to(at::kFloat), batch.labels);
      agree_on(loss.item<double>());
      return pipeline::Result{loss, logits};
    };
    steps.step = [this] { optimizer_->step(); };
    return steps;
  }

  std::vector<pipeline::PipelinedModule<ClickBatch>> pipelined() const {
    return {{"tables", tables_, [](const ClickBatch& batch) { return batch.sparse; }}};
  }

  // In the reader's thread, ahead of the steps and no further than the last one. A checkpoint holds
  // the number of steps that were done, so it knows nothing of what was read ahead.
  std::optional<ClickBatch> read_batch() {
    if (next_read_ >= options_.num_steps) return std::nullopt;
    const std::int64_t length = source_.num_steps();
    source_.seek(length < 0 ? next_read_ : next_read_ % length);
    ++next_read_;
    return source_.next();
  }

  using Rows = comm::LazyAwaitable<jagged::KeyedTensor>;

  Rows look_up(const SparseInputs& inputs) {
    const Span span(Phase::kLookup);
    const Rows pending = tables_->compute_and_output_dist(inputs.of(*tables_));
    return Rows([pending] {
      const Span span(Phase::kOutputDist);
      return pending.wait();
    });
  }

  // One small message beside backward: the loss over all ranks, whether one of them was told to
  // stop, and how long they waited in the step before.
  void agree_on(double loss) {
    at::Tensor words = at::empty({3}, at::kDouble);
    auto* word = words.data_ptr<double>();
    word[0] = loss;
    word[1] = is_told_to_stop_ && is_told_to_stop_() ? 1.0 : 0.0;
    word[2] = last_exposed_;
    agreed_ = comm::all_reduce_async(words, group_);
  }

  void finish(Progress& progress) {
    const Span span(Phase::kOther, "loss of all ranks");
    const at::Tensor words = agreed_->wait();
    const auto* word = words.const_data_ptr<double>();
    progress.loss = word[0] / group_.size();
    is_stopping_ = word[1] > 0;
    progress.mean_exposed = word[2] / group_.size();
  }

  void follow(const at::Tensor& logits) {
    const Span span(Phase::kOther, "running AUC");
    if (++num_followed_ % kAucWindow == 0) running_.clear();
    const at::Tensor plain = logits.detach().to(at::kFloat).contiguous();
    running_.add(floats(plain), floats(labels_));
  }

  TrainingOptions options_;
  comm::Group group_;
  core::StepRecorder& recorder_;
  BatchSource source_;
  BatchSource judged_;
  data_parallel::DistributedDataParallel<Dlrm> model_;
  std::shared_ptr<ShardedEmbeddingBagCollection> tables_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<Checkpoints> checkpoints_;
  pipeline::TrainPipelineSparseDist<ClickBatch> pipeline_;
  std::int64_t next_read_ = 0;  // the step whose batch is read next; the reader's
  std::optional<pipeline::ReadAhead<ClickBatch>> reader_;
  at::Tensor labels_;  // of the batch that was computed last
  StreamingAuc running_;
  std::int64_t num_followed_ = 0;
  std::function<bool()> is_told_to_stop_;
  std::optional<comm::Awaitable<at::Tensor>> agreed_;  // loss, wish to stop, waiting
  double last_exposed_ = 0;
  bool is_stopping_ = false;
};

bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

}  // namespace

Summary train(const TrainingOptions& options, std::shared_ptr<const ClickLog> log,
              const sharding::ModulePlan& plan, const comm::Group& group,
              core::StepRecorder& recorder, const Listener& listener,
              const std::function<bool()>& is_told_to_stop) {
  check(options, group);
  const core::UseRecorder use(recorder);
  Training training(options, std::move(log), plan, group, recorder);
  training.listen_for_stop(is_told_to_stop);
  Summary summary;
  summary.first_step = training.resume();
  summary.last_step = summary.first_step;
  if (listener.started) listener.started(summary.first_step);
  for (std::int64_t step = summary.first_step; step < options.num_steps; ++step) {
    comm::set_step(step + 1);
    const Progress progress = training.step(step);
    summary.last_step = progress.step;
    summary.loss = progress.loss;
    if (listener.stepped) listener.stepped(progress);
    summary.has_diverged = !std::isfinite(progress.loss);
    if (summary.has_diverged) break;
    const bool is_last = progress.step == options.num_steps;
    if (training.is_stopping() && !is_last) {
      summary.was_stopped = true;
      training.save(progress.step, /*waits=*/true);
      break;
    }
    if (is_due(progress.step, options.eval_every) || is_last) {
      summary.evaluation = training.evaluate(progress.step);
      if (listener.evaluated) listener.evaluated(*summary.evaluation);
      summary.has_diverged = std::isnan(summary.evaluation->log_loss);
      if (summary.has_diverged) break;
    }
    if (is_due(progress.step, options.checkpoint_every) ||
        (is_last && options.checkpoint_every > 0)) {
      training.save(progress.step, is_last);
    }
  }
  summary.fingerprint = training.fingerprint();
  return summary;
}

}  // namespace tessera::workloads::dlrm
