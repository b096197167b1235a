// tessera train dlrm — the flags of this workload and their meaning.

#include <filesystem>

#include "dlrm_flags.h"
#include "flags.h"
#include "resume.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "workload.h"
#include "workload_flags.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera train dlrm [flags]

  tessera train dlrm --ranks 2                       a made-up click log with a known best AUC
  tessera train dlrm --ranks 4 --data day_0.tsv      Criteo's format, or a file of tessera data
  tessera train dlrm --resume runs/2026-11-15-1      go on after the newest checkpoint of a run

Trains DLRM: tables over all ranks, dense layers on each. Writes a run folder with report.html.

ranks
  -n, --ranks N             processes on this host (1)
  --sharding S              auto, table_wise, row_wise, column_wise or data_parallel (auto)
  --plan FILE               the plan itself, as JSON
data
  --data D                  synthetic, or a file (synthetic)
  --tables N --rows N       of synthetic data, or rows of a Criteo file's tables (26, 100000)
  --bag N                   ids per feature, synthetic (1)
model
  --dim N --bottom W --top W --interaction dot|cross    (32; 128,32; 128,64,1; dot)
training
  --steps N --batch N       steps (300), samples per rank and step (2048)
  --optimizer O --lr X      dense: sgd, adagrad, adam (adagrad, 0.05)
  --table-optimizer O --table-lr X   tables: also rowwise_adagrad, partial_rowwise_adam
                            (rowwise_adagrad, 0.05)
  --warmup N --decay D      steps up to the full rate (0); then none, linear or cosine (none)
  --precision P             float32, or bfloat16 for the dense layers
  --eval-every N --eval-samples N    (100, 65536)
  --checkpoint-every N --keep N      steps (0: when told to stop), how many stay (2)
  --seed N                  of data and parameters (1)
output
  --runs DIR                where run folders go (runs)
  --json                    one JSON object at the end
  --config FILE             read flags from a TOML file; --print-config shows the result
More: docs/train_your_own.md, docs/report.md
)";

void check(const TrainDlrmWords& given) {
  if (given.data != "synthetic" && !std::filesystem::exists(given.data)) {
    throw launch::LaunchError(launch::kExitData, "train: there is no file " + given.data,
                              "--data names it", "name a file, or leave --data out");
  }
  if (!given.plan.empty() && !std::filesystem::exists(given.plan)) {
    throw launch::LaunchError(launch::kExitConfiguration, "train: there is no file " + given.plan,
                              "--plan names it", "name a file, or use --sharding");
  }
  const auto bottom = widths_of(given.bottom);
  const auto top = widths_of(given.top);
  if (bottom.back() != given.embedding_dim || top.back() != 1) {
    throw launch::LaunchError(
        launch::kExitConfiguration,
        "train: --bottom ends with " + std::to_string(bottom.back()) + " and --top with " +
            std::to_string(top.back()) + ", --dim is " + std::to_string(given.embedding_dim),
        "the bottom layers end as wide as the embeddings, the top layers with one number",
        "let --bottom end with --dim, and --top with 1");
  }
}

ResumeRules resume_rules() {
  return {{"tables", "rows", "dim", "bottom", "top", "interaction", "optimizer", "table-optimizer",
           "seed"},
          {"data", "bag", "lr", "table-lr", "warmup", "decay", "precision", "eval-samples"}};
}

// Tables are cut anew for other ranks, but samples are counted over all of them.
void check_samples(const std::string& folder, const Settings& saved, const Settings& given) {
  const auto samples = [](const Settings& settings) {
    return std::stoll(settings.at("ranks")) * std::stoll(settings.at("batch"));
  };
  const auto words = [](const Settings& settings) {
    return "--ranks " + settings.at("ranks") + " --batch " + settings.at("batch");
  };
  if (samples(saved) == samples(given)) return;
  const std::int64_t ranks = std::stoll(given.at("ranks"));
  const bool divides = samples(saved) % ranks == 0;
  throw launch::LaunchError(
      launch::kExitConfiguration,
      "train: a step of " + folder + " has " + std::to_string(samples(saved)) +
          " samples over all ranks, one of this call " + std::to_string(samples(given)),
      "the run has " + words(saved) + ", this call has " + words(given),
      divides ? "--batch " + std::to_string(samples(saved) / ranks)
              : "--ranks and --batch whose product is " + std::to_string(samples(saved)));
}

int read(const std::vector<std::string>& words) {
  const std::string folder = resumed_folder(words);
  if (!folder.empty()) check_is_run(folder);
  const std::vector<std::string> all = with_resumed_config(words);
  const int num_ranks = read_words<TrainDlrmWords>(all, kHelp, check);
  if (folder.empty() || num_ranks == 0) return num_ranks;
  const Settings saved = settings_of<TrainDlrmWords>({"--config", folder + "/config.toml"});
  const Settings given = settings_of<TrainDlrmWords>(all);
  check_samples(folder, saved, given);
  compare_with_saved(folder, saved, given, resume_rules());
  return num_ranks;
}

}  // namespace

const Workload kDlrmWorkload{"dlrm", "train-dlrm", kHelp, read, flags_of<TrainDlrmWords>};

}  // namespace tessera::cli
