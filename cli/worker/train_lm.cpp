// tessera-worker train-lm — one rank of `tessera train lm`.

#include <unistd.h>

#include <cstdio>
#include <exception>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "lm/train.h"
#include "lm_flags.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/group.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

constexpr int kUsage = 2;
constexpr int kFailed = 1;

workloads::LmOptions options_of(const TrainLmWords& words) {
  workloads::LmOptions options;
  options.file = words.file;
  options.steps = words.num_steps;
  options.batch = words.batch;
  options.learning_rate = words.learning_rate;
  options.data_ranks = words.data_ranks;
  options.vocab_ranks = words.vocab_ranks;
  options.model.length = words.length;
  options.model.layers = words.num_layers;
  options.model.heads = words.num_heads;
  options.model.width = words.width;
  options.model.seed = static_cast<std::uint64_t>(words.seed);
  return options;
}

/// Rewrites one line on a terminal; prints a line now and then into a pipe.
class ProgressLine {
 public:
  ProgressLine(std::int64_t num_steps, bool is_shown)
      : num_steps_(num_steps), is_shown_(is_shown), is_terminal_(isatty(STDOUT_FILENO) == 1) {}

  void show(const workloads::LmProgress& progress) {
    if (!is_shown_) return;
    const bool is_last = progress.step == num_steps_;
    const std::int64_t every = std::max<std::int64_t>(num_steps_ / 10, 1);
    if (!is_terminal_ && !is_last && progress.step % every != 0 && progress.step != 1) return;
    const double left =
        static_cast<double>(num_steps_ - progress.step) * progress.milliseconds / 1e3;
    std::printf("%sstep %ld/%ld | loss %.4f | %.1fk tokens/s | %.1f ms | eta %.0fs%s",
                is_terminal_ ? "\r" : "", static_cast<long>(progress.step),
                static_cast<long>(num_steps_), progress.loss, progress.tokens_per_second / 1e3,
                progress.milliseconds, left, is_terminal_ && !is_last ? " " : "\n");
    std::fflush(stdout);
  }

 private:
  std::int64_t num_steps_;
  bool is_shown_;
  bool is_terminal_;
};

int run(const std::vector<std::string>& words) {
  CLI::App app("", "train-lm");
  TrainLmWords given;
  define_flags(app, given);
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "error: train lm: %s\n", error.what());
    return kUsage;
  }
  try {
    const comm::Group world = comm::init();
    // Ranks of one host share its cores.
    at::set_num_threads(std::max(1, at::get_num_threads() / world.size()));
    ProgressLine line(given.num_steps, world.rank() == 0 && !given.as_json);
    workloads::LmProgress last;
    const double loss =
        workloads::train_lm(options_of(given), world, [&](const workloads::LmProgress& progress) {
          last = progress;
          line.show(progress);
        });
    if (world.rank() == 0 && given.as_json) {
      const nlohmann::ordered_json report = {{"workload", "lm"},
                                             {"ranks", world.size()},
                                             {"steps", last.step},
                                             {"loss", loss},
                                             {"tokens_per_second", last.tokens_per_second}};
      std::printf("%s\n", report.dump().c_str());
    }
  } catch (const c10::ValueError& error) {
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
    return kFailed;
  }
  return 0;
}

}  // namespace

const WorkerVerb kTrainLmVerb{"train-lm", run};

}  // namespace tessera::cli
