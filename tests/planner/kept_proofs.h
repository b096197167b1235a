// planner/kept_proofs.h — plans of a test, kept for the checker that shares no code with the
// planner.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "tessera/planner/explain.h"
#include "tessera/planner/planner.h"

namespace tessera::planner::tests {

/// A file NAME.lines in the folder that $TESSERA_KEPT_PROOFS names: problem and result by turns, a
/// line each. Without the folder nothing is kept.
class KeptProofs {
 public:
  explicit KeptProofs(const std::string& name) {
    const char* folder = std::getenv("TESSERA_KEPT_PROOFS");
    if (folder != nullptr) file_.open(std::string(folder) + "/" + name + ".lines");
  }

  void keep(const Problem& problem, const PlanResult& result) {
    if (!file_.is_open()) return;
    for (std::string text : {to_json(problem), to_json(problem, result)}) {
      text.erase(std::remove(text.begin(), text.end(), '\n'), text.end());
      file_ << text << '\n';
    }
    file_.flush();
  }

 private:
  std::ofstream file_;
};

}  // namespace tessera::planner::tests
