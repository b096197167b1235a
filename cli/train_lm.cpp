// tessera train lm — the flags of this workload and their meaning.

#include <filesystem>

#include "flags.h"
#include "lm_flags.h"
#include "resume.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "usage.h"
#include "workload.h"
#include "workload_flags.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kHelp =
    R"(tessera train lm [flags]

  tessera train lm --ranks 2                      vocabulary over two ranks
  tessera train lm --ranks 4 --vocab-ranks 2      two pairs, each with half of every batch
  tessera train lm --file book.txt --steps 1000 --save runs/book
  tessera train lm --resume runs/book             go on after the newest checkpoint

Trains a small GPT on the bytes of a text, by default the library's own source text. Embedding and
last layer are sharded by the vocabulary, and the logits are never held whole. For one seed the
losses are the same for every number of ranks.

ranks
  -n, --ranks N             processes on this host (1)
  --vocab-ranks N           ranks that share the vocabulary (all)
  --data-ranks N            ranks that share the batch (what the vocabulary's leave over)
data
  --file FILE               a text to read instead
training
  --steps N --batch N       steps (200), sequences per step over all ranks (16)
  --length N                tokens per sequence (128)
  --layers N --heads N --width N   of the network (4, 4, 128)
  --lr X --seed N           learning rate (0.001), of parameters and batches (1)
output
  --save DIR                a new folder for checkpoints and the configuration
  --resume DIR              go on with such a folder, on any number of ranks
  --checkpoint-every N --keep N   steps (0: after the last), how many stay (2)
  --json                    one JSON object at the end
  --config FILE             read flags from a TOML file; --print-config shows the result
More: docs/vocab_parallel.md
)";

void check_mesh(const TrainLmWords& given) {
  const int data = given.data_ranks;
  const int vocab = given.vocab_ranks;
  const int ranks = given.num_ranks;
  const bool fits = data > 0 && vocab > 0 ? data * vocab == ranks
                                          : ranks % (data > 0    ? data
                                                     : vocab > 0 ? vocab
                                                                 : 1) ==
                                                0;
  if (fits) return;
  throw launch::LaunchError(
      launch::kExitConfiguration,
      "train: " + std::to_string(ranks) + " ranks cannot form a mesh of " + std::to_string(data) +
          " data and " + std::to_string(vocab) + " vocabulary ranks",
      "the product of the two must be the number of ranks; 0 is chosen freely",
      "choose --data-ranks and --vocab-ranks so that they divide --ranks");
}

ResumeRules resume_rules() {
  return {.fixed = {"batch", "length", "layers", "heads", "width", "seed"}, .told = {"file", "lr"}};
}

void check(const TrainLmWords& given) {
  check_mesh(given);
  if (!given.save.empty() && !given.resume.empty()) {
    throw UsageError(
        "train: --save and --resume name two folders; --resume saves where it resumes");
  }
  if (!given.save.empty() && std::filesystem::exists(given.save + "/config.toml")) {
    throw launch::LaunchError(
        launch::kExitConfiguration, "train: there is a run in " + given.save + " already",
        "--save is for a new one", "--resume " + given.save + ", or another folder");
  }
  if (given.checkpoint_every > 0 && given.save.empty() && given.resume.empty()) {
    throw UsageError("train: --checkpoint-every needs --save, which says where");
  }
}

int read(const std::vector<std::string>& words) {
  const std::string folder = resumed_folder(words);
  if (!folder.empty()) check_is_run(folder);
  const std::vector<std::string> all = with_resumed_config(words);
  const int num_ranks = read_words<TrainLmWords>(all, kHelp, check);
  if (folder.empty() || num_ranks == 0) return num_ranks;
  compare_with_saved(folder, settings_of<TrainLmWords>({"--config", folder + "/config.toml"}),
                     settings_of<TrainLmWords>(all), resume_rules());
  return num_ranks;
}

}  // namespace

const Workload kLmWorkload{"lm", "train-lm", kHelp, read, flags_of<TrainLmWords>};

}  // namespace tessera::cli
