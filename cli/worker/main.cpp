// The `tessera-worker` program: the part of `tessera` that needs LibTorch. Started by `tessera`,
// not by people.

#include <cstdio>
#include <exception>

#include "worker_verb.h"

int main(int argc, char** argv) {
  using namespace tessera::cli;
  static constexpr const WorkerVerb* kVerbs[] = {&kPlanGraphVerb, &kStoreVerb,   &kTrainDlrmVerb,
                                                 &kTrainGnnVerb,  &kTrainLmVerb, &kDoctorRankVerb};
  const std::string name = argc > 1 ? argv[1] : "";
  try {
    for (const WorkerVerb* verb : kVerbs) {
      if (verb->name == name) return verb->run({argv + 2, argv + argc});
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: internal: %s\n", error.what());
    return 70;
  }
  std::fprintf(stderr, "error: unknown verb '%s'; this program is started by tessera\n",
               name.c_str());
  return 2;
}
