// tessera-worker train-lm — one rank of `tessera train lm`.

#include <algorithm>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "lm/train.h"
#include "lm_flags.h"
#include "report/run_folder.h"
#include "tessera/checkpoint/error.h"
#include "tessera/comm/environment.h"
#include "tessera/comm/group.h"
#include "tessera/launch/exit_code.h"
#include "worker/progress_line.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

namespace report = workloads::report;

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
  const std::string folder = words.resume.empty() ? words.save : words.resume;
  if (!folder.empty()) options.checkpoints = folder + "/checkpoints";
  options.checkpoint_every = words.checkpoint_every;
  options.keep_checkpoints = words.keep;
  options.resume = !words.resume.empty();
  return options;
}

std::string text_of(const workloads::LmProgress& progress, std::int64_t num_steps) {
  const double left = static_cast<double>(num_steps - progress.step) * progress.milliseconds / 1e3;
  char text[160];
  std::snprintf(text, sizeof(text),
                "step %ld/%ld | loss %.4f | %.1fk tokens/s | %.1f ms | eta %.0fs",
                static_cast<long>(progress.step), static_cast<long>(num_steps), progress.loss,
                progress.tokens_per_second / 1e3, progress.milliseconds, left);
  return text;
}

int train_lm(const std::vector<std::string>& words) {
  CLI::App app("", "train-lm");
  TrainLmWords given;
  define_flags(app, given);
  try {
    std::vector<std::string> flags = with_resumed_config(words);
    std::reverse(flags.begin(), flags.end());
    app.parse(flags);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "error: train lm: %s\n", error.what());
    return kUsage;
  }
  try {
    const comm::Group world = comm::init();
    // Ranks of one host share its cores.
    at::set_num_threads(std::max(1, at::get_num_threads() / world.size()));
    ProgressLine line(given.num_steps);
    const bool is_shown = world.rank() == 0 && !given.as_json;
    workloads::LmProgress last;
    if (world.rank() == 0 && !given.save.empty()) {
      std::filesystem::create_directories(given.save);
      report::write_text(given.save + "/" + report::kConfigFile, app.config_to_str(true, false));
    }
    const auto stepped = [&](const workloads::LmProgress& progress) {
      last = progress;
      if (is_shown && line.is_due(progress.step)) {
        line.show(progress.step, text_of(progress, given.num_steps));
      }
    };
    std::int64_t first_step = 0;
    const auto started = [&](std::int64_t step) {
      first_step = step;
      last.step = step;
      if (!is_shown || given.resume.empty()) return;
      std::printf("resumed  at step %ld\n", static_cast<long>(step));
      std::fflush(stdout);
    };
    const double loss = workloads::train_lm(options_of(given), world, stepped, started);
    if (world.rank() == 0 && given.as_json) {
      const nlohmann::ordered_json report = {{"workload", "lm"},
                                             {"ranks", world.size()},
                                             {"first_step", first_step},
                                             {"steps", last.step},
                                             {"loss", loss},
                                             {"tokens_per_second", last.tokens_per_second}};
      std::printf("%s\n", report.dump().c_str());
    }
  } catch (const checkpoint::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return launch::kExitData;
  } catch (const report::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return launch::kExitData;
  } catch (const c10::ValueError& error) {
    std::fprintf(stderr, "error: %s\n", error.what_without_backtrace());
    return kFailed;
  }
  return 0;
}

}  // namespace

const WorkerVerb kTrainLmVerb{"train-lm", train_lm};

}  // namespace tessera::cli
