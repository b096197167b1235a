// trainer/train.h — the one loop: schedule, steps, evaluation, checkpoints, resume.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/comm/group.h"
#include "tessera/core/export.h"
#include "tessera/core/step_recorder.h"
#include "trainer/workload.h"

namespace tessera::trainer {

struct Progress {
  std::int64_t step = 0;  // from 1
  double loss = 0;        // mean over all ranks, before the step
  double learning_rate = 0;
  core::StepTotals time;    // of this rank
  double mean_exposed = 0;  // exposed communication in the step before, mean over ranks; 0 at first
};

/// Called as training goes on, on every rank.
struct Listener {
  std::function<void(std::int64_t first_step)> started;  // after a checkpoint was loaded
  std::function<void(const Progress&)> stepped;
  std::function<void(std::int64_t step, const Figures&)> evaluated;
};

struct Summary {
  std::int64_t first_step = 0;  // steps that a checkpoint had done already
  std::int64_t last_step = 0;
  bool was_stopped = false;
  bool was_finished = false;      // before this call, which has changed nothing
  bool ended_early = false;       // by --patience
  bool has_diverged = false;      // the loss, or what was judged, is not a number
  double loss = 0;                // of the last step
  Figures evaluation;             // the last
  std::int64_t best_step = 0;     // of the evaluation with the lowest first number; 0: none
  double best = 0;                // that number
  std::int64_t num_worse = 0;     // evaluations since then
  std::uint64_t fingerprint = 0;  // of all parameters of all ranks; the same on all of them
};

/// What the learning rate is multiplied with in step `step` (from 0): up from 1/warmup in `warmup`
/// steps, then by `decay` ("none", "linear", "cosine") down to 0 after the last one. Throws
/// ValueError for another word.
TESSERA_API double schedule_factor(std::int64_t step, std::int64_t num_steps, std::int64_t warmup,
                                   const std::string& decay);

/// "sgd", "adagrad" or "adam"; throws ValueError, beginning with `who`, for another word.
TESSERA_API std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& who, const std::string& name, std::vector<at::Tensor> parameters,
    double learning_rate);

/// Where the best checkpoint by evaluation is kept, beside the folder of the others.
inline constexpr const char* kBestFolder = "best";

/// Trains `workload` by its settings. Collective over `world`. `checkpoints` is their folder; none
/// are saved or loaded if it is empty. Goes on after the newest one if the settings say so. The
/// newest one of a finished run is the final one; the best by evaluation lies alone in a folder
/// `best` beside `checkpoints`, whose files it shares as long as both are there.
///
/// When `is_told_to_stop` returns true on any rank, all finish the step and save. When the loss is
/// not a number any more, all stop and save nothing. Phases go to `recorder`. Throws ValueError for
/// a checkpoint of another job, checkpoint::Error for one that cannot be used.
TESSERA_API Summary train(AnyWorkload& workload, const comm::Group& world,
                          const std::string& checkpoints, core::StepRecorder& recorder,
                          const Listener& listener = {},
                          const std::function<bool()>& is_told_to_stop = {});

/// What a model is worth, and which it is.
struct Judgement {
  Figures figures;
  std::int64_t step = 0;   // of the checkpoint
  std::string checkpoint;  // its folder
};

/// Loads the checkpoint of `step` (-1: the newest) from the folder `checkpoints` and evaluates.
/// Collective over `world`. Throws checkpoint::Error for one that cannot be used.
TESSERA_API Judgement judge(AnyWorkload& workload, const comm::Group& world,
                            const std::string& checkpoints, std::int64_t step = -1);

}  // namespace tessera::trainer
