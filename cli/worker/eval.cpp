// tessera-worker eval, predict — one rank of `tessera eval` and `tessera predict`.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include <ATen/Parallel.h>
#include <nlohmann/json.hpp>

#include "data/columns.h"
#include "data/whole_file.h"
#include "dlrm/settings.h"
#include "dlrm/training.h"
#include "eval_flags.h"
#include "gnn/training.h"
#include "lm/training.h"
#include "report/run_folder.h"
#include "tessera/checkpoint/error.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/comm/failure.h"
#include "tessera/launch/exit_code.h"
#include "tessera/launch/launch_error.h"
#include "trainer/last_words.h"
#include "trainer/train.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

namespace dlrm = workloads::dlrm;
namespace report = workloads::report;
using Json = nlohmann::ordered_json;

// The settings of the run, for this many ranks.
template <class Settings>
Settings settings_of(const std::string& verb, const EvalWords& words) {
  Settings settings;
  read(verb, settings.table(), {"--config", words.run + "/" + report::kConfigFile});
  settings.num_ranks = words.ranks;
  if (words.batch > 0) settings.batch = words.batch;
  return settings;
}

// The folder of the checkpoint that is asked for.
std::string checkpoints_of(const EvalWords& words) {
  const std::string best = words.run + "/" + trainer::kBestFolder;
  if (!words.takes_best) return words.run + "/checkpoints";
  if (checkpoint::list_steps(best).empty()) {
    throw checkpoint::Error(checkpoint::ErrorKind::kMissing,
                            words.run + ": keeps no best checkpoint. Leave --best out.");
  }
  return best;
}

float probability(float logit) {
  return static_cast<float>(1 / (1 + std::exp(-static_cast<double>(logit))));
}

void write_scores(const std::string& path, const std::vector<float>& logits) {
  if (path.ends_with(".parquet")) {
    std::vector<float> probabilities;
    probabilities.reserve(logits.size());
    for (const float logit : logits) probabilities.push_back(probability(logit));
    workloads::data::write_scores_parquet(path, probabilities);
    return;
  }
  // Whole or not at all: a long file that was cut off looks like a short one.
  workloads::data::WholeFile file(path);
  std::string text = "sample,probability\n";
  char number[64];
  const auto put = [&](auto value) {
    text.append(number, std::to_chars(number, number + sizeof(number), value).ptr);
  };
  for (std::size_t i = 0; i < logits.size(); ++i) {
    put(i);
    text += ',';
    put(probability(logits[i]));
    text += '\n';
    if (text.size() > (1U << 20)) {
      file.write(text);
      text.clear();
    }
  }
  file.write(text);
  file.finish();
}

void say(const EvalWords& words, const dlrm::Judged& judged) {
  if (words.wants_json) {
    Json answer{{"run", words.run}, {"checkpoint", judged.checkpoint}, {"step", judged.step}};
    for (const auto& [name, value] : judged.figures) answer[name] = value;
    answer["samples"] = judged.scores.size();
    if (!words.out.empty()) answer["out"] = words.out;
    std::printf("%s\n", answer.dump().c_str());
    return;
  }
  std::printf("model    %s\n", judged.checkpoint.c_str());
  std::printf("judged   log loss %.4f | auc %.4f | normalised entropy %.4f | calibration %.3f\n",
              judged.figures[0].second, judged.figures[1].second, judged.figures[2].second,
              judged.figures[3].second);
  std::printf("samples  %zu%s%s\n", judged.scores.size(), words.out.empty() ? "" : ", written to ",
              words.out.c_str());
}

// Of the other workloads: figures by their names. `what` was judged, `count` of them.
void say(const EvalWords& words, const trainer::Judgement& model, const std::string& what = "",
         std::int64_t count = 0) {
  if (words.wants_json) {
    Json answer{{"run", words.run}, {"checkpoint", model.checkpoint}, {"step", model.step}};
    for (const auto& [name, value] : model.figures) answer[name] = value;
    if (!what.empty()) answer[what] = count;
    if (!words.out.empty()) answer["out"] = words.out;
    std::printf("%s\n", answer.dump().c_str());
    return;
  }
  std::printf("model    %s\n", model.checkpoint.c_str());
  std::string text;
  for (const auto& [name, value] : model.figures) {
    std::string title = name;
    std::replace(title.begin(), title.end(), '_', ' ');
    char one[96];
    std::snprintf(one, sizeof(one), "%s %.4f%s", title.c_str(), value,
                  name == "energy_error" ? " per atom" : "");
    text += (text.empty() ? "" : " | ") + std::string(one);
  }
  if (!text.empty()) std::printf("judged   %s\n", text.c_str());
  if (what.empty()) return;
  std::printf("%s %lld%s%s\n", what.c_str(), static_cast<long long>(count),
              words.out.empty() ? "" : ", written to ", words.out.c_str());
}

int judge_text(const std::string& verb, const EvalWords& words, const comm::Group& world) {
  auto settings = settings_of<workloads::lm::Settings>(verb, words);
  // A mesh is of the ranks that it was made for.
  settings.data_ranks_wanted = settings.vocab_ranks_wanted = 0;
  settings.sample = 0;
  // What was trained on need not be there any more.
  if (!words.data.empty()) settings.file = settings.eval_file = words.data;
  const auto model = workloads::lm::make_workload(settings, world);
  const trainer::Judgement judged =
      trainer::judge(*model, world, checkpoints_of(words), words.step);
  if (judged.figures.empty()) {
    throw dlrm::DataError(words.run + ": kept no text to judge on. Name one with --data.");
  }
  if (world.rank() == 0) say(words, judged);
  return 0;
}

int judge_structures(const std::string& verb, const EvalWords& words, const comm::Group& world) {
  const auto settings = settings_of<workloads::gnn::Settings>(verb, words);
  const workloads::gnn::Judged judged = workloads::gnn::judge(
      settings, words.data, checkpoints_of(words), words.step, verb == "predict", world);
  if (world.rank() != 0) return 0;
  if (!words.out.empty()) workloads::data::write_whole(words.out, judged.predicted);
  say(words, judged.model, "structures", judged.num_structures);
  return 0;
}

int run_rank(const std::string& verb, const EvalWords& words, const comm::Group& world) {
  const std::string workload = workload_of(words.run);
  if (workload == "lm") return judge_text(verb, words, world);
  if (workload == "gnn") return judge_structures(verb, words, world);
  auto settings = settings_of<dlrm::Settings>(verb, words);
  settings.plan.clear();  // of the ranks that it was made for
  const std::string schema = words.run + "/" + dlrm::kSchemaFile;
  const dlrm::Judged judged =
      dlrm::judge(settings, words.data, checkpoints_of(words), words.step,
                  std::filesystem::exists(schema) ? report::read_text(schema) : "", world);
  if (world.rank() != 0) return 0;
  if (!words.out.empty()) write_scores(words.out, judged.scores);
  say(words, judged);
  return 0;
}

int run(const std::string& verb, const std::vector<std::string>& all) {
  const EvalWords words = read_eval_words(verb, all);
  const comm::Group world = comm::init();
  const auto fail = [&](const std::string& text, int code) {
    return trainer::end_alike(world, verb + ": " + text, code);
  };
  try {
    return comm::guarded([&] { return run_rank(verb, words, world); });
  } catch (const dlrm::DataError& error) {
    return fail(error.what(), launch::kExitData);
  } catch (const report::Error& error) {
    return fail(error.what(), launch::kExitData);
  } catch (const checkpoint::Error& error) {
    return fail(error.what(), launch::kExitData);
  } catch (const launch::LaunchError& error) {
    return fail(error.what(), error.exit_code());
  } catch (const c10::ValueError& error) {
    return fail(error.what_without_backtrace(), launch::kExitConfiguration);
  }
}

int run_eval(const std::vector<std::string>& words) { return run("eval", words); }
int run_predict(const std::vector<std::string>& words) { return run("predict", words); }

}  // namespace

const WorkerVerb kEvalVerb{"eval", run_eval};
const WorkerVerb kPredictVerb{"predict", run_predict};

}  // namespace tessera::cli
