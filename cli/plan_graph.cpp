// tessera plan graph — the partitioners on one graph.

#include "flags.h"
#include "plan_graph_flags.h"
#include "plan_subject.h"
#include "usage.h"
#include "worker_program.h"

namespace tessera::cli {
namespace {

int run(const std::vector<std::string>& words) {
  CLI::App app("", "plan");
  PlanGraphWords given;
  define(app, given.table());
  const NamesAndFlags sorted = names_and_flags(app, words);
  read_flags(app, sorted.flags);
  if (given.wants_help) return print_help(PlanGraphWords{}.table().help());
  if (sorted.names.size() != 1)
    throw UsageError("plan: name one file, as in tessera plan graph FILE");
  std::vector<std::string> command{"plan-graph", sorted.names[0]};
  command.insert(command.end(), sorted.flags.begin(), sorted.flags.end());
  become_worker("plan", std::move(command));
}

std::vector<std::string> flags() {
  CLI::App app("", "plan");
  PlanGraphWords words;
  define(app, words.table());
  return long_flags(app);
}

}  // namespace

const PlanSubject kPlanGraph{"graph", run, flags};

}  // namespace tessera::cli
