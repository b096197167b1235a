// tessera plan — prints and explains how something would be split.

#include <algorithm>
#include <set>

#include "flags.h"
#include "plan_subject.h"
#include "usage.h"
#include "verb.h"

namespace tessera::cli {
namespace {

constexpr const PlanSubject* kSubjects[] = {&kPlanTables, &kPlanGraph};

constexpr std::string_view kHelp =
    R"(tessera plan <subject> [flags]

  tessera plan tables --ranks 4 --tables 26 --rows 1000000 --dim 64    tables of a DLRM
  tessera plan graph --ranks 16 water.xyz                              nodes and edges of a graph

Says which part goes to which rank, what every rank has to hold, send and do, and what other ways
of cutting would cost. Starts no ranks.

subjects
  tables   embedding tables: where each lies, memory and time of a step on every rank
  graph    the partitioners side by side on one graph

tessera plan <subject> --help shows the flags of one.
More: docs/planning.md
)";

int run(const std::vector<std::string>& words) {
  if (words.empty()) throw UsageError("plan: name a subject, as in tessera plan graph FILE");
  if (words[0] == "--help" || words[0] == "-h") return print_help(kHelp);
  const auto found =
      std::find_if(std::begin(kSubjects), std::end(kSubjects),
                   [&](const PlanSubject* subject) { return subject->name == words[0]; });
  if (found == std::end(kSubjects)) {
    throw UsageError("plan: there is no subject '" + words[0] + "'" +
                     suggestion(words[0], {"tables", "graph"}));
  }
  return (*found)->run({words.begin() + 1, words.end()});
}

std::vector<std::string> flags() {
  std::set<std::string> all;
  for (const PlanSubject* subject : kSubjects) {
    for (std::string& flag : subject->flags()) all.insert(std::move(flag));
  }
  return {all.begin(), all.end()};
}

std::map<std::string, std::string> values() {
  return {{"--sharding", "auto balanced table_wise row_wise column_wise data_parallel"},
          {"--objective", "sum phases"},
          {"--effort", "low normal high"},
          {"--table-optimizer", "sgd adagrad rowwise_adagrad adam partial_rowwise_adam"},
          {"--element-bytes", "1 2 4 8"},
          {"--profile", "assume"}};
}

}  // namespace

const Verb kPlanVerb{
    "plan", "explain how tables or a graph would be split", kHelp, run, flags, "tables graph",
    values};

}  // namespace tessera::cli
