// tessera-worker train-dlrm, train-lm, train-gnn — one rank of `tessera train`.

#include "dlrm/settings.h"
#include "dlrm/training.h"
#include "gnn/training.h"
#include "lm/training.h"
#include "trainer/run.h"
#include "worker_verb.h"

namespace tessera::cli {
namespace {

template <class Settings>
int train(const std::vector<std::string>& words) {
  Settings given;
  Settings saved;
  trainer::read(given, saved, words, /*tells=*/false);
  // Found by the kind of settings.
  return trainer::run(given, [&](const comm::Group& world) { return make_workload(given, world); });
}

}  // namespace

const WorkerVerb kTrainDlrmVerb{"train-dlrm", train<workloads::dlrm::Settings>};
const WorkerVerb kTrainLmVerb{"train-lm", train<workloads::lm::Settings>};
const WorkerVerb kTrainGnnVerb{"train-gnn", train<workloads::gnn::Settings>};

}  // namespace tessera::cli
