// The `tessera-worker` program: the part of `tessera` that needs LibTorch. Started by `tessera`,
// not by people.

#include <cstdio>
#include <exception>

#include "tessera/comm/error.h"
#include "tessera/launch/exit_code.h"
#include "worker_verb.h"

namespace {

/// Whether another rank failed first; `tessera` then looks for that one.
bool begins_elsewhere(tessera::comm::ErrorKind kind) {
  using tessera::comm::ErrorKind;
  return kind == ErrorKind::kPeerLost || kind == ErrorKind::kPeerFailed ||
         kind == ErrorKind::kTimeout || kind == ErrorKind::kAborted;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tessera::cli;
  static constexpr const WorkerVerb* kVerbs[] = {
      &kEvalVerb,      &kPredictVerb,  &kPlanGraphVerb, &kPlanTablesVerb, &kStoreVerb,
      &kTrainDlrmVerb, &kTrainGnnVerb, &kTrainLmVerb,   &kDoctorRankVerb, &kProfileRankVerb};
  const std::string name = argc > 1 ? argv[1] : "";
  try {
    for (const WorkerVerb* verb : kVerbs) {
      if (verb->name == name) return verb->run({argv + 2, argv + argc});
    }
  } catch (const tessera::comm::Error& error) {
    const bool is_of_others = begins_elsewhere(error.kind());
    std::fprintf(stderr, "error: %s%s\n", is_of_others ? "" : "internal: ", error.what());
    return is_of_others ? tessera::launch::kExitLostPeer : 70;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: internal: %s\n", error.what());
    return 70;
  }
  std::fprintf(stderr, "error: unknown verb '%s'; this program is started by tessera\n",
               name.c_str());
  return 2;
}
