// cli/worker/worker_verb.h — what `tessera` asks of `tessera-worker`, the program with LibTorch.
//
// To add one: write cli/worker/<verb>.cpp with a `const WorkerVerb`, declare it here, and add it to
// the table in main.cpp and to cli/CMakeLists.txt.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::cli {

struct WorkerVerb {
  std::string_view name;
  /// Runs the verb with the words after its name; returns the exit code.
  int (*run)(const std::vector<std::string>& words);
};

extern const WorkerVerb kEvalVerb;
extern const WorkerVerb kPlanGraphVerb;
extern const WorkerVerb kPlanTablesVerb;
extern const WorkerVerb kPredictVerb;
extern const WorkerVerb kProfileRankVerb;
extern const WorkerVerb kStoreVerb;
extern const WorkerVerb kTrainDlrmVerb;
extern const WorkerVerb kTrainGnnVerb;
extern const WorkerVerb kDoctorRankVerb;
extern const WorkerVerb kTrainLmVerb;

}  // namespace tessera::cli
