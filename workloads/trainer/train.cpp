#include "trainer/train.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <numbers>
#include <utility>

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
#include "trainer/device.h"
#include "trainer/host_copy.h"
#include "trainer/publish.h"

namespace tessera::trainer {
namespace {

constexpr const char* kStep = "step";
constexpr const char* kLoss = "loss";
constexpr const char* kBestStep = "best_step";
constexpr const char* kBest = "best";
constexpr const char* kNumWorse = "evaluations_since_best";

bool is_due(std::int64_t step, std::int64_t every) { return every > 0 && step % every == 0; }

std::int64_t number_of(const checkpoint::Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? 0 : std::get<std::int64_t>(found->second);
}

double real_of(const checkpoint::Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? 0 : std::get<double>(found->second);
}

// "a, b and c".
std::string listed(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == words.size() ? " and " : ", ") + words[i];
  }
  return text;
}

// Gives checkpoint `folder` a second name, alone under `root`; its bytes are on the disk once.
void keep_alone(const std::filesystem::path& folder, const std::filesystem::path& root) {
  namespace fs = std::filesystem;
  const fs::path draft = root / (".draft-" + folder.filename().string());
  const fs::path whole = root / folder.filename();
  fs::remove_all(draft);
  fs::create_directories(draft);
  for (const auto& file : fs::directory_iterator(folder)) {
    std::error_code error;
    fs::create_hard_link(file.path(), draft / file.path().filename(), error);
    if (error) fs::copy_file(file.path(), draft / file.path().filename());
  }
  fs::remove_all(whole);
  fs::rename(draft, whole);
  for (const auto& other : fs::directory_iterator(root)) {
    if (other.path() != whole) fs::remove_all(other.path());
  }
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
  void save(const Summary& summary, bool waits) {
    const std::int64_t step = summary.last_step;
    state_.values[kStep] = step;
    state_.values[kLoss] = summary.loss;
    state_.values[kBestStep] = summary.best_step;
    state_.values[kBest] = summary.best;
    state_.values[kNumWorse] = summary.num_worse;
    settle();
    const bool keeps = workload_.settings().keep_model == "best" && summary.best_step == step;
    if (keeps && world_.rank() == 0) best_ = step;
    if (workload_.saves()) {
      saver_.save(step, state_);
      if (waits) saver_.wait();
    }
    if (waits) settle();
    if (waits) comm::barrier(world_);  // nobody loads or ends before it is there
  }

  // The newest, if there is one.
  void load(Summary& summary) {
    if (checkpoint::list_steps(folder_).empty()) return;
    const checkpoint::LoadReport report = checkpoint::load(folder_, state_, group_);
    check_marks(report);
    summary.first_step = number_of(report.values, kStep);
    summary.loss = real_of(report.values, kLoss);
    summary.best_step = number_of(report.values, kBestStep);
    summary.best = real_of(report.values, kBest);
    summary.num_worse = number_of(report.values, kNumWorse);
  }

  // The best may still be on its way when training ends.
  void finish() {
    if (best_ > 0) settle();
    comm::barrier(world_);
  }

 private:
  // Keeps the best one, before a later save can remove it.
  void settle() {
    if (best_ == 0) return;
    saver_.wait();
    const std::filesystem::path root(folder_);
    try {
      keep_alone(root / checkpoint::folder_name(best_), root.parent_path() / kBestFolder);
    } catch (const std::filesystem::filesystem_error& error) {
      std::fprintf(stderr, "warning: train: the best checkpoint, of step %ld, is not kept: %s\n",
                   static_cast<long>(best_), error.what());
    }
    best_ = 0;
  }

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
  std::int64_t best_ = 0;  // step of a save that is the best so far and not kept yet, on rank 0
};

// One step after the other, and what the ranks tell each other beside it.
//
// On a device of its own, the host must not wait for the loss of a step before it has given the
// device the next one: it learns the loss of a step one step late.
class Steps {
 public:
  /// `publisher` may be null.
  Steps(AnyWorkload& workload, const comm::Group& world, core::StepRecorder& recorder,
        const std::function<bool()>& is_told_to_stop, const Publisher* publisher)
      : workload_(workload),
        settings_(workload.settings()),
        world_(world),
        recorder_(recorder),
        is_told_to_stop_(is_told_to_stop),
        publisher_(publisher),
        is_late_(workload.device().has_value()) {}
  ~Steps() { workload_.stop(); }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  void start(std::int64_t first_step) {
    workload_.start(
        {first_step, workload_.num_steps(), [this](const at::Tensor& loss) { computed(loss); }});
  }

  // Does one step and returns what is known of the last one whose loss is.
  std::optional<Progress> step(std::int64_t step) {
    recorder_.begin_step(step);
    Progress progress;
    progress.step = step + 1;
    const double factor =
        schedule_factor(step, workload_.num_steps(), settings_.warmup, settings_.decay);
    progress.learning_rate = factor * settings_.learning_rate;
    workload_.scale_rates(factor);
    if (!workload_.step()) {
      has_ended_ = true;
      recorder_.end_step();
      return std::nullopt;
    }
    std::optional<Progress> known = is_late_ ? std::exchange(waiting_, progress) : progress;
    if (known) finish(*known);
    if (!known || std::isfinite(known->loss)) workload_.follow();
    (is_late_ ? *waiting_ : *known).time = recorder_.end_step();
    last_exposed_ = (is_late_ ? *waiting_ : *known).time.exposed_comm_seconds();
    return known;
  }

  // The last step, if its loss is not known yet.
  std::optional<Progress> rest() {
    std::optional<Progress> known = std::exchange(waiting_, std::nullopt);
    if (!known) return known;
    agree_on(loss_.wait().item<double>());
    finish(*known);
    return known;
  }

  bool is_stopping() const noexcept { return is_stopping_; }
  /// The samples have ended: the last step was none.
  bool has_ended() const noexcept { return has_ended_; }
  /// By rank 0's clock, when no rank is still writing.
  bool is_publishing() const noexcept { return is_publishing_; }

 private:
  void computed(const at::Tensor& loss) {
    if (!is_late_) return agree_on(loss.item<double>());
    // Of the step before: its number has arrived, or will while the device has enough to do.
    if (waiting_) agree_on(loss_.wait().item<double>());
    loss_.start(loss.to(at::kDouble));
  }

  // One small message beside backward: the loss over all ranks, whether one of them was told to
  // stop, how long they waited in the step before, and whether it is time to publish.
  void agree_on(double loss) {
    at::Tensor words = at::zeros({5}, at::kDouble);
    auto* word = words.data_ptr<double>();
    word[0] = loss;
    word[1] = is_told_to_stop_ && is_told_to_stop_() ? 1.0 : 0.0;
    word[2] = last_exposed_;
    if (publisher_ != nullptr) {
      word[3] = world_.rank() == 0 && publisher_->is_due() ? 1.0 : 0.0;
      word[4] = publisher_->is_writing() ? 1.0 : 0.0;
    }
    agreed_ = comm::all_reduce_async(words, world_);
  }

  void finish(Progress& progress) {
    const core::Span span(core::Phase::kOther, "loss of all ranks");
    const at::Tensor words = agreed_->wait();
    const auto* word = words.const_data_ptr<double>();
    progress.loss = word[0] / world_.size();
    is_stopping_ = word[1] > 0;
    is_publishing_ = word[3] > 0 && word[4] == 0;
    progress.mean_exposed = word[2] / world_.size();
  }

  AnyWorkload& workload_;
  const Settings& settings_;
  comm::Group world_;
  core::StepRecorder& recorder_;
  const std::function<bool()>& is_told_to_stop_;
  const Publisher* publisher_;
  bool is_late_;
  HostCopy loss_;                                      // of the step in waiting_
  std::optional<Progress> waiting_;                    // done, but for its loss
  std::optional<comm::Awaitable<at::Tensor>> agreed_;  // loss, wish to stop, waiting
  double last_exposed_ = 0;
  bool is_stopping_ = false;
  bool has_ended_ = false;
  bool is_publishing_ = false;
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

std::optional<at::Device> AnyWorkload::device() const {
  if (settings().device == "cpu") return std::nullopt;
  return device_of(settings());
}

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

Judgement judge(AnyWorkload& workload, const comm::Group& world, const std::string& checkpoints,
                std::int64_t step) {
  checkpoint::State state;
  workload.add_state(state);
  checkpoint::LoadOptions options;
  if (step >= 0) options.step = step;
  const checkpoint::LoadReport report =
      checkpoint::load(checkpoints, state, workload.saving_group(world), options);
  return {workload.evaluate(), report.step, report.folder};
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
  const std::int64_t num_steps = workload.num_steps();
  summary.was_finished = summary.first_step > 0 && summary.first_step >= num_steps;
  if (summary.was_finished) {
    summary.fingerprint = fingerprint_of(workload, world);
    return summary;
  }
  workload.begin();
  if (listener.started) listener.started(summary.first_step);
  std::unique_ptr<Publisher> publisher;
  if (!settings.publish.empty()) publisher = std::make_unique<Publisher>(workload, world);
  Steps steps(workload, world, recorder, is_told_to_stop, publisher.get());
  steps.start(summary.first_step);
  const auto judge = [&](std::int64_t step) {
    summary.evaluation = workload.evaluate();
    if (summary.evaluation.empty()) return;
    if (listener.evaluated) listener.evaluated(step, summary.evaluation);
    const double figure = summary.evaluation[0].second;
    summary.has_diverged = std::isnan(figure);
    const bool is_best = summary.best_step == 0 || figure < summary.best;
    if (is_best && !summary.has_diverged) {
      summary.best_step = step;
      summary.best = figure;
    }
    summary.num_worse = is_best ? 0 : summary.num_worse + 1;
  };
  const auto save = [&](bool waits) {
    if (saved) saved->save(summary, waits);
  };
  const auto tell = [&](const std::optional<Progress>& progress) {
    if (!progress || summary.has_diverged) return;
    summary.loss = progress->loss;
    if (listener.stepped) listener.stepped(*progress);
    summary.has_diverged = !std::isfinite(progress->loss);
    if (summary.has_diverged) summary.last_step = progress->step;
  };
  for (std::int64_t step = summary.first_step; step < num_steps; ++step) {
    comm::set_step(step + 1);
    summary.last_step = step + 1;
    tell(steps.step(step));
    bool is_last = summary.last_step == num_steps;
    if (steps.has_ended()) {
      summary.last_step = step;
      is_last = true;
    }
    const bool judges = is_due(step + 1, settings.eval_every) || is_last;
    const bool saves = is_due(step + 1, settings.checkpoint_every) && !steps.has_ended();
    const bool stops = steps.is_stopping() && !is_last;
    // Who waits for samples may wait for long: servers get what was learned so far.
    const bool publishes =
        publisher && (steps.is_publishing() || is_last || stops || workload.has_caught_up());
    // What is judged, saved, published or left must be known to be sound.
    if (!summary.has_diverged && (judges || saves || stops || publishes)) tell(steps.rest());
    if (summary.has_diverged) break;
    if (publishes) publisher->publish(summary.last_step, /*waits=*/is_last || stops);
    if (stops) {
      summary.was_stopped = true;
      save(/*waits=*/true);
      break;
    }
    if (judges) judge(summary.last_step);
    if (summary.has_diverged) break;
    summary.ended_early =
        !is_last && settings.patience > 0 && summary.num_worse >= settings.patience;
    is_last = is_last || summary.ended_early;
    const bool is_kept = !settings.save.empty() || !settings.resume.empty();
    const bool saves_last =
        is_last && (settings.checkpoint_every > 0 || is_kept || settings.keep_model != "none");
    const bool saves_best = settings.keep_model == "best" && summary.best_step == summary.last_step;
    if (saves || saves_last || saves_best) save(is_last);
    if (publisher && summary.ended_early) publisher->publish(summary.last_step, /*waits=*/true);
    if (is_last) break;
  }
  workload.finish();
  if (saved) saved->finish();
  summary.fingerprint = fingerprint_of(workload, world);
  return summary;
}

}  // namespace tessera::trainer
