#include "trainer/train.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/failure.h"
#include "tessera/core/check.h"
#include "tessera/data_parallel/fingerprint.h"

namespace tessera::trainer {
namespace {

constexpr const char* kStep = "step";
constexpr const char* kLoss = "loss";

bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

std::int64_t number_of(const checkpoint::Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? 0 : std::get<std::int64_t>(found->second);
}

// "a, b and c".
std::string listed(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == words.size() ? " and " : ", ") + words[i];
  }
  return text;
}

class Checkpoints {
 public:
  Checkpoints(AnyWorkload& workload, const comm::Group& world, const std::string& folder)
      : workload_(workload),
        world_(world),
        group_(workload.saving_group(world)),
        folder_(folder),
        saver_(folder, group_, save_options(workload)) {
    workload.add_state(state_);
    for (const Mark& mark : workload.marks()) state_.values[mark.name] = mark.value;
  }

  // Beside training, or until it is on the disk.
  void save(std::int64_t step, double loss, bool waits) {
    state_.values[kStep] = step;
    state_.values[kLoss] = loss;
    if (workload_.saves()) {
      saver_.save(step, state_);
      if (waits) saver_.wait();
    }
    if (waits) comm::barrier(world_);  // nobody loads or ends before it is there
  }

  // The newest, if there is one.
  void load(Summary& summary) {
    if (checkpoint::list_steps(folder_).empty()) return;
    const checkpoint::LoadReport report = checkpoint::load(folder_, state_, group_);
    check_marks(report);
    summary.first_step = number_of(report.values, kStep);
    const auto loss = report.values.find(kLoss);
    if (loss != report.values.end()) summary.loss = std::get<double>(loss->second);
  }

 private:
  static checkpoint::SaveOptions save_options(const AnyWorkload& workload) {
    checkpoint::SaveOptions options;
    options.keep = workload.settings().keep;
    options.log = [](const std::string&) {};
    return options;
  }

  void check_marks(const checkpoint::LoadReport& report) const {
    std::vector<std::string> saved;
    std::vector<std::string> own;
    bool is_same = true;
    for (const Mark& mark : workload_.marks()) {
      const std::int64_t there = number_of(report.values, mark.name);
      is_same = is_same && there == mark.value;
      saved.push_back(mark.before + std::to_string(there) + mark.after);
      own.push_back(std::to_string(mark.value));
    }
    TESSERA_CHECK_VALUE(is_same, workload_.name(), ".resume: ", report.folder, " is of a job with ",
                        listed(saved), "; this one has ", listed(own), ".");
  }

  AnyWorkload& workload_;
  comm::Group world_;
  comm::Group group_;
  std::string folder_;
  checkpoint::State state_;
  checkpoint::AsyncSaver saver_;
};

// One step after the other, and what the ranks tell each other beside it.
class Steps {
 public:
  Steps(AnyWorkload& workload, const comm::Group& world, core::StepRecorder& recorder,
        const std::function<bool()>& is_told_to_stop)
      : workload_(workload),
        settings_(workload.settings()),
        world_(world),
        recorder_(recorder),
        is_told_to_stop_(is_told_to_stop) {}
  ~Steps() { workload_.stop(); }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  void start(std::int64_t first_step) {
    workload_.start({first_step, settings_.num_steps,
                     [this](const at::Tensor& loss) { agree_on(loss.item<double>()); }});
  }

  Progress step(std::int64_t step) {
    recorder_.begin_step(step);
    Progress progress;
    progress.step = step + 1;
    const double factor =
        schedule_factor(step, settings_.num_steps, settings_.warmup, settings_.decay);
    progress.learning_rate = factor * settings_.learning_rate;
    workload_.scale_rates(factor);
    workload_.step();
    finish(progress);
    if (std::isfinite(progress.loss)) workload_.follow();
    progress.time = recorder_.end_step();
    last_exposed_ = progress.time.exposed_comm_seconds();
    return progress;
  }

  bool is_stopping() const noexcept { return is_stopping_; }

 private:
  // One small message beside backward: the loss over all ranks, whether one of them was told to
  // stop, and how long they waited in the step before.
  void agree_on(double loss) {
    at::Tensor words = at::empty({3}, at::kDouble);
    auto* word = words.data_ptr<double>();
    word[0] = loss;
    word[1] = is_told_to_stop_ && is_told_to_stop_() ? 1.0 : 0.0;
    word[2] = last_exposed_;
    agreed_ = comm::all_reduce_async(words, world_);
  }

  void finish(Progress& progress) {
    const core::Span span(core::Phase::kOther, "loss of all ranks");
    const at::Tensor words = agreed_->wait();
    const auto* word = words.const_data_ptr<double>();
    progress.loss = word[0] / world_.size();
    is_stopping_ = word[1] > 0;
    progress.mean_exposed = word[2] / world_.size();
  }

  AnyWorkload& workload_;
  const Settings& settings_;
  comm::Group world_;
  core::StepRecorder& recorder_;
  const std::function<bool()>& is_told_to_stop_;
  std::optional<comm::Awaitable<at::Tensor>> agreed_;  // loss, wish to stop, waiting
  double last_exposed_ = 0;
  bool is_stopping_ = false;
};

std::uint64_t fingerprint_of(const AnyWorkload& workload, const comm::Group& world) {
  std::uint64_t sum = 0;
  for (const at::Tensor& parameter : workload.parameters()) {
    sum = sum * 31 + data_parallel::fingerprint(parameter.detach());
  }
  at::Tensor all = at::full({1}, static_cast<std::int64_t>(sum), at::kLong);
  comm::all_reduce_(all, world);
  return static_cast<std::uint64_t>(all.item<std::int64_t>());
}

}  // namespace

AnyWorkload::~AnyWorkload() = default;

void AnyWorkload::scale_rates(double factor) {
  for (auto& group : optimizer().param_groups()) {
    group.options().set_lr(factor * settings().learning_rate);
  }
}

std::string AnyWorkload::rates() const {
  char text[64];
  std::snprintf(text, sizeof(text), "--lr %g", settings().learning_rate);
  return text;
}

double schedule_factor(std::int64_t step, std::int64_t num_steps, std::int64_t warmup,
                       const std::string& decay) {
  TESSERA_CHECK_VALUE(decay == "none" || decay == "linear" || decay == "cosine",
                      "train: there is no decay '", decay, "'. There are none, linear and cosine.");
  if (step < warmup) return static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (decay == "none") return 1;
  const auto length = static_cast<double>(std::max<std::int64_t>(1, num_steps - warmup));
  const double done = static_cast<double>(step - warmup) / length;
  if (decay == "linear") return std::max(0.0, 1 - done);
  return 0.5 * (1 + std::cos(std::numbers::pi * std::min(1.0, done)));
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& who,
                                                        const std::string& name,
                                                        std::vector<at::Tensor> parameters,
                                                        double learning_rate) {
  using namespace torch::optim;
  if (name == "sgd") {
    return std::make_unique<SGD>(std::move(parameters), SGDOptions(learning_rate));
  }
  if (name == "adagrad") {
    return std::make_unique<Adagrad>(std::move(parameters), AdagradOptions(learning_rate));
  }
  TESSERA_CHECK_VALUE(name == "adam", who, ": there is no optimizer '", name,
                      "'. There are sgd, adagrad and adam.");
  return std::make_unique<Adam>(std::move(parameters), AdamOptions(learning_rate));
}

Summary train(AnyWorkload& workload, const comm::Group& world, const std::string& checkpoints,
              core::StepRecorder& recorder, const Listener& listener,
              const std::function<bool()>& is_told_to_stop) {
  const Settings& settings = workload.settings();
  const core::UseRecorder use(recorder);
  std::unique_ptr<Checkpoints> saved;
  if (!checkpoints.empty()) saved = std::make_unique<Checkpoints>(workload, world, checkpoints);
  Summary summary;
  if (saved && !settings.resume.empty()) saved->load(summary);
  summary.last_step = summary.first_step;
  workload.begin();
  if (listener.started) listener.started(summary.first_step);
  Steps steps(workload, world, recorder, is_told_to_stop);
  steps.start(summary.first_step);
  const auto judge = [&](std::int64_t step) {
    summary.evaluation = workload.evaluate();
    if (summary.evaluation.empty()) return;
    if (listener.evaluated) listener.evaluated(step, summary.evaluation);
    summary.has_diverged = std::isnan(summary.evaluation[0].second);
  };
  const auto save = [&](bool waits) {
    if (saved) saved->save(summary.last_step, summary.loss, waits);
  };
  for (std::int64_t step = summary.first_step; step < settings.num_steps; ++step) {
    comm::set_step(step + 1);
    const Progress progress = steps.step(step);
    summary.last_step = progress.step;
    summary.loss = progress.loss;
    if (listener.stepped) listener.stepped(progress);
    summary.has_diverged = !std::isfinite(progress.loss);
    if (summary.has_diverged) break;
    const bool is_last = progress.step == settings.num_steps;
    if (steps.is_stopping() && !is_last) {
      summary.was_stopped = true;
      save(/*waits=*/true);
      break;
    }
    if (is_due(progress.step, settings.eval_every) || is_last) judge(progress.step);
    if (summary.has_diverged) break;
    const bool is_kept = !settings.save.empty() || !settings.resume.empty();
    const bool saves_last = is_last && (settings.checkpoint_every > 0 || is_kept);
    if (is_due(progress.step, settings.checkpoint_every) || saves_last) save(is_last);
  }
  summary.fingerprint = fingerprint_of(workload, world);
  return summary;
}

}  // namespace tessera::trainer
