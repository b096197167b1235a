#include "lm/settings.h"

#include <filesystem>

#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"

namespace tessera::workloads::lm {
namespace {

constexpr const char* kHead =
    R"(tessera train lm [flags]

  tessera train lm --ranks 2                      vocabulary over two ranks
  tessera train lm --ranks 4 --vocab-ranks 2      two pairs, each with half of every batch
  tessera train lm --file book.txt --steps 1000 --save runs/book
  tessera train lm --file book.txt --tokenizer tokenizer.json --eval-every 100 --sample 60
  tessera train lm --resume runs/book             go on after the newest checkpoint

Trains a small GPT on the bytes or tokens of a text, by default the library's own source text.
Embedding and last layer are sharded by the vocabulary, and the logits are never held whole. For one
seed the losses are the same for every number of ranks.

)";

}  // namespace

Settings::Settings() { batch = 16; }

settings::Table Settings::table() {
  settings::Table table(kHead, "More: docs/vocab_parallel.md, docs/report.md\n");
  add_ranks(table);
  add_device(table);
  table.add("vocab-ranks", vocab_ranks_wanted, "N", "ranks that share the vocabulary")
      .range(0, 256)
      .shown("all");
  table.add("data-ranks", data_ranks_wanted, "N", "ranks that share the batch")
      .range(0, 4096)
      .shown("what the vocabulary's leave over");
  table.group("data");
  table.add("file", file, "FILE", "a text to read instead").told();
  table.add("tokenizer", tokenizer, "FILE", "tokenizer.json of Hugging Face; without it, bytes")
      .fixed();
  table.add("eval-file", eval_file, "FILE", "judge on this, not on the text's last tenth").told();
  table.group("training");
  table.add("steps", num_steps, "N", "steps").range(0, std::int64_t{1} << 40);
  table.add("batch", batch, "N", "sequences per step over all ranks")
      .range(1, 1 << 20)
      .fixed()
      .beside();
  table.add("length", length, "N", "tokens per sequence").range(1, 1 << 20).fixed();
  table.add("epochs", epochs, "N", "through the text, not --steps")
      .range(0, std::int64_t{1} << 40)
      .shown("")
      .told();
  table.add("shuffle", shuffle, "", "its pieces, anew every epoch").told().beside();
  table.add("layers", num_layers, "N", "layers").range(1, 128).fixed();
  table.add("heads", num_heads, "N", "heads").range(1, 128).fixed().beside();
  table.add("width", width, "N", "width of the network").range(1, 1 << 16).fixed().beside();
  table.add("lr", learning_rate, "X", "learning rate").not_negative().told();
  add_schedule(table);
  table.add("eval-every", eval_every, "N", "steps (0: at the end)")
      .range(0, std::int64_t{1} << 40)
      .shown("");
  table.add("eval-batches", eval_batches, "N", "to judge").range(1, 1 << 20).told().beside();
  table.add("patience", patience, "N", "evaluations without a better one end it (0: never)")
      .range(0, std::int64_t{1} << 40)
      .shown("");
  table.add("sample", sample, "N", "tokens of text to write at every evaluation").range(0, 1 << 20);
  table.add("prompt", prompt, "TEXT", "how it begins");
  table.add("temperature", temperature, "X", "0: always the likeliest").not_negative().beside();
  add_checkpoints(table);
  add_seed(table, "of parameters and batches");
  add_output(table);
  return table;
}

void Settings::check() const {
  trainer::Settings::check();
  if (shuffle && epochs == 0) {
    throw launch::LaunchError(launch::kExitConfiguration, "train: --shuffle is for --epochs",
                              "without epochs, sequences are drawn from anywhere in the text",
                              "--epochs N, or leave --shuffle out");
  }
  if (!file.empty() && (!std::filesystem::exists(file) || std::filesystem::is_directory(file))) {
    throw launch::LaunchError(launch::kExitData, "train: there is no file " + file,
                              "--file names it", "name a text, or leave --file out");
  }
  for (const auto& [flag, name] :
       {std::pair{"--tokenizer", tokenizer}, {"--eval-file", eval_file}}) {
    if (name.empty() || std::filesystem::is_regular_file(name)) continue;
    throw launch::LaunchError(launch::kExitData, "train: there is no file " + name,
                              std::string(flag) + " names it",
                              std::string("name a file, or leave ") + flag + " out");
  }
  const int data = data_ranks_wanted;
  const int vocab = vocab_ranks_wanted;
  const int one = data > 0 ? data : vocab > 0 ? vocab : 1;
  const bool fits = data > 0 && vocab > 0 ? data * vocab == num_ranks : num_ranks % one == 0;
  if (fits) return;
  throw launch::LaunchError(
      launch::kExitConfiguration,
      "train: " + std::to_string(num_ranks) + " ranks cannot form a mesh of " +
          std::to_string(data) + " data and " + std::to_string(vocab) + " vocabulary ranks",
      "the product of the two must be the number of ranks; 0 is chosen freely",
      "choose --data-ranks and --vocab-ranks so that they divide --ranks");
}

}  // namespace tessera::workloads::lm
